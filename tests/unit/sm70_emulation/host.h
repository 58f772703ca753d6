// Runs the blocks of a CUDA kernel on the CPU: one fiber a thread, switched at barriers. What is PTX on a GPU is plain
// arithmetic here; tensor-core fragments are laid out as FRAG says, and where lanes
// that must hold the same do not, the result is infinite.
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;
alignas(32) uint4 smem[6144];

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T min(T a, T b) { return a < b ? a : b; }
template <class T> static inline T max(T a, T b) { return a > b ? a : b; }
template <class To, class From> static inline To bits(From v) { To t; memcpy(&t, &v, sizeof t); return t; }
static inline float __int_as_float(int v) { return bits<float>(v); }
static inline int __float_as_int(float v) { return bits<int>(v); }
static inline unsigned __float_as_uint(float v) { return bits<unsigned>(v); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
static inline int atomicAdd(int* p, int v) { return (*p += v) - v; }
static inline int __float2int_rn(float v) { return (int)std::nearbyint(v); }
#define __expf(v) expf(v)
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    unsigned char from[8];
    memcpy(from, &a, 4);
    memcpy(from + 4, &b, 4);
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)from[s >> (4 * i) & 7] << (8 * i);
    return r;
}

// ---- fibers and barriers ----
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static std::function<void()> body;
static unsigned arrived_block, arrived_warp[32];

static void yield() {
    unsigned me = threadIdx.x;
    swapcontext(&fibers[me].context, &scheduler);
}
static void meet(unsigned& arrived, unsigned members) {
    unsigned target = arrived / members * members + members;
    arrived++;
    while (arrived < target) yield();
}
static inline void __syncthreads() { meet(arrived_block, blockDim.x); }
static inline void __syncwarp() { meet(arrived_warp[threadIdx.x >> 5], 32); }
static void start() {
    body();
    fibers[threadIdx.x].done = true;
    while (true) yield();
}
static void run_block(unsigned threads) {
    fibers.assign(threads, {});
    arrived_block = 0;
    memset(arrived_warp, 0, sizeof arrived_warp);
    memset(smem, 0xFF, sizeof smem);  // NaN: what is read must have been written
    for (auto& f : fibers) {
        f.stack.resize(256 * 1024);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        makecontext(&f.context, start, 0);
    }
    for (unsigned left = threads; left;) {
        left = 0;
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i].done) continue;
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
            left += !fibers[i].done;
        }
    }
}
static void run_grid(unsigned x, unsigned y, unsigned z, unsigned threads, std::function<void()> kernel) {
    gridDim = {x, y, z};
    blockDim = {threads, 1, 1};
    body = std::move(kernel);
    for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) run_block(threads);
}
template <class T> static T from_lane(T v, unsigned thread) {
    static T slot[1024];
    slot[threadIdx.x] = v;
    __syncwarp();
    T got = slot[thread];
    __syncwarp();
    return got;
}
template <class T> static T __shfl_xor_sync(unsigned, T v, int lanes) { return from_lane(v, threadIdx.x ^ lanes); }
template <class T> static T __shfl_sync(unsigned, T v, int lane) { return from_lane(v, (threadIdx.x & ~31u) + (lane & 31)); }
template <class T> static T __shfl_up_sync(unsigned, T v, int lanes) {
    return from_lane(v, (threadIdx.x & 31) < (unsigned)lanes ? threadIdx.x : threadIdx.x - lanes);
}
static unsigned __ballot_sync(unsigned, bool v) {
    unsigned all = (unsigned)v << (threadIdx.x & 31);
    for (int lanes = 1; lanes < 32; lanes *= 2) all |= __shfl_xor_sync(~0u, all, lanes);
    return all;
}

static bool __any_sync(unsigned, bool v) {
    int any = v;
    for (int lanes = 1; lanes < 32; lanes *= 2) any |= __shfl_xor_sync(~0u, any, lanes);
    return any;
}

// ---- half precision ----
static inline double lo(unsigned v) { return bits<_Float16>((unsigned short)v); }
static inline double hi(unsigned v) { return bits<_Float16>((unsigned short)(v >> 16)); }
static inline unsigned half2(double l, double h) {
    return bits<unsigned short>((_Float16)l) | (unsigned)bits<unsigned short>((_Float16)h) << 16;
}
static inline unsigned hfma2(unsigned a, unsigned b, unsigned c) { return half2(lo(a) * lo(b) + lo(c), hi(a) * hi(b) + hi(c)); }
static inline unsigned hmul2(unsigned a, unsigned b) { return half2(lo(a) * lo(b), hi(a) * hi(b)); }
static inline unsigned choose(unsigned mask, unsigned a, unsigned b) { return (a & mask) | (b & ~mask); }
static inline unsigned habs_add2(unsigned a, unsigned b) { return half2(fabs(lo(a)) + fabs(lo(b)), fabs(hi(a)) + fabs(hi(b))); }
static inline float2 h2f(unsigned a) { return {(float)lo(a), (float)hi(a)}; }
static inline float hf(unsigned short a) { return (float)bits<_Float16>(a); }
static inline unsigned short fh(float x) { return bits<unsigned short>((_Float16)x); }
static inline uint4 ld_stream(const uint4* p) { return *p; }
template <class T> static inline T ld_once(const T* p) { return *p; }

// ---- tensor cores: m16n16k16, D = A * B + D ----
// Which element of a sum a lane holds is this file's own choice.
static int sum_row(int e) { return (threadIdx.x & 31) / 4 + 8 * (e >> 1 & 1); }
static int sum_column(int e) { return 2 * (threadIdx.x & 3) + (e & 1) + 8 * (e >> 2); }
static void wmma_mma(float (&c)[8], const unsigned (&a)[8], const unsigned (&b)[8]) {
    static unsigned fa[1024][8], fb[1024][8];
    unsigned me = threadIdx.x, first = me & ~31u;
    memcpy(fa[me], a, 32);
    memcpy(fb[me], b, 32);
    __syncwarp();
    float A[16][16], B[16][16];  // [row][k], [column][k]
    for (int i = 0; i < 256; i++) A[i >> 4][i & 15] = B[i >> 4][i & 15] = NAN;
    auto put = [](float (&m)[16][16], int row, int k, unsigned pair) {
        float l = (float)lo(pair), h = (float)hi(pair);
        bool again = !std::isnan(m[row][k]);
        if (again && (m[row][k] != l || m[row][k + 1] != h)) l = h = INFINITY;  // shows in the result
        m[row][k] = l;
        m[row][k + 1] = h;
    };
    for (unsigned l = 0; l < 32; l++) {
#if FRAG == 70
        for (int i = 0; i < 8; i++) {
            put(A, (l & 3) + 4 * (l >> 4) + 8 * (l >> 2 & 1), 2 * i, fa[first + l][i]);
            put(B, (l & 3) + 4 * (l >> 4) + 8 * (l >> 3 & 1), 2 * i, fb[first + l][i]);
        }
#else
        for (int i = 0; i < 4; i++) {
            put(A, (l >> 2) + 8 * (i & 1), 2 * (l & 3) + 8 * (i >> 1), fa[first + l][i]);
            put(B, (l >> 2) + 8 * (i >> 1), 2 * (l & 3) + 8 * (i & 1), fb[first + l][i]);
        }
#endif
    }
    for (int e = 0; e < 8; e++)
        for (int k = 0; k < 16; k++) c[e] += A[sum_row(e)][k] * B[sum_column(e)][k];
    __syncwarp();
}
static void wmma_store(float* p, const float (&c)[8], int ld) {
    for (int e = 0; e < 8; e++) p[sum_column(e) * ld + sum_row(e)] = c[e];
    __syncwarp();
}
static void wmma_store_c(float* p, const float (&c)[8], int ld) {
    for (int e = 0; e < 8; e++) p[sum_row(e) * ld + sum_column(e)] = c[e];
    __syncwarp();
}
static void wmma_load_c(float (&c)[8], const float* p, int ld) {
    for (int e = 0; e < 8; e++) c[e] = p[sum_row(e) * ld + sum_column(e)];
    __syncwarp();
}
static unsigned half_pair(const unsigned short* p, int step) { return p[0] | (unsigned)p[step] << 16; }
static void wmma_a(unsigned (&f)[8], const unsigned short* p, int ld) {
    unsigned l = threadIdx.x & 31;
#if FRAG == 70
    for (int i = 0; i < 8; i++) f[i] = half_pair(p + ((l & 3) + 4 * (l >> 4) + 8 * (l >> 2 & 1)) * ld + 2 * i, 1);
#else
    for (int i = 0; i < 8; i++) f[i] = half_pair(p + ((l >> 2) + 8 * (i & 1)) * ld + 2 * (l & 3) + 8 * (i >> 1 & 1), 1);
#endif
    __syncwarp();
}
static void wmma_b(unsigned (&f)[8], const unsigned short* p, int of_column, int of_k) {
    unsigned l = threadIdx.x & 31;
#if FRAG == 70
    for (int i = 0; i < 8; i++) f[i] = half_pair(p + ((l & 3) + 4 * (l >> 4) + 8 * (l >> 3 & 1)) * of_column + 2 * i * of_k, of_k);
#else
    for (int i = 0; i < 8; i++)
        f[i] = half_pair(p + ((l >> 2) + 8 * (i >> 1 & 1)) * of_column + (2 * (l & 3) + 8 * (i & 1)) * of_k, of_k);
#endif
    __syncwarp();
}
static void wmma_b_col(unsigned (&f)[8], const unsigned short* p, int ld) { wmma_b(f, p, ld, 1); }
static void wmma_b_row(unsigned (&f)[8], const unsigned short* p, int ld) { wmma_b(f, p, 1, ld); }
static void wmma_mma_row(float (&c)[8], const unsigned (&a)[8], const unsigned (&b)[8]) { wmma_mma(c, a, b); }
