// NVFP4 matrix times several vectors on tensor cores: wmma m16n16k16, which is HMMA.884 on sm_70 and the device's own
// tensor instruction on newer GPUs. Each lane expands the weights of its own fragment in registers (exactly, to
// scale * e2m1 * 2^-8); products are summed in float32. As the order of k in a sum is free, lane c of FRAG 80 takes 32
// consecutive k of a row (one 16-byte load), and takes x alike.
#include "sm70_common.cuh"

DEV void wmma_store(float* p, const float (&c)[8], int ld) {
    asm volatile("wmma.store.d.sync.aligned.col.m16n16k16.shared.f32 [%0],{%1,%2,%3,%4,%5,%6,%7,%8},%9;"
        :: "r"((u32)__cvta_generic_to_shared(p)), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), "f"(c[4]), "f"(c[5]),
           "f"(c[6]), "f"(c[7]), "r"(ld) : "memory");
}

// ok[0] = 1 if fragments are laid out as FRAG says. One warp; shared memory 1024 bytes.
extern "C" __global__ void fragment_check(int* ok)
{
    extern __shared__ uint4 smem[];
    u16* t = (u16*)smem;  // t[row][k] = row << 4 | k
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) t[i] = (u16)i;
    __syncwarp();
    u32 a[8], b[8], p = (u32)__cvta_generic_to_shared(t);
    asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],16;"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]), "=r"(a[4]), "=r"(a[5]), "=r"(a[6]), "=r"(a[7]) : "r"(p) : "memory");
    asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],16;"
        : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]), "=r"(b[4]), "=r"(b[5]), "=r"(b[6]), "=r"(b[7]) : "r"(p) : "memory");
    bool good = true;
#if FRAG == 70
    for (int i = 0; i < 8; i++) {
        u32 pair = 2 * i | (2 * i + 1) << 16;
        good &= b[i] == (pair | (u32)frag_b(lane) * 0x100010u) && a[i] == (pair | (u32)frag_a(lane) * 0x100010u);
    }
#else
    int g = lane >> 2, c = lane & 3;
    for (int i = 0; i < 4; i++) {
        u32 ka = 2 * c + 8 * (i >> 1), kb = 2 * c + 8 * (i & 1), ra = g + 8 * (i & 1), rb = g + 8 * (i >> 1);
        good &= a[i] == ((ka | (ka + 1) << 16) | ra * 0x100010u) && b[i] == ((kb | (kb + 1) << 16) | rb * 0x100010u);
    }
#endif
    good = __all_sync(~0u, good);
    if (!lane) ok[0] = good;
}

struct Gemm {
    const uint4* qw;         // [N][K/32] packed words (of the block's expert)
    const u16* sc;           // [N][K/32] pairs of e4m3 scales
    const float* gs;         // [N]
    const u16* x;            // half, rows of x_stride
    const u16* bias;         // [N] half or null
    u16* y;                  // [rows][N] half
    const int* rows;         // null, or: tile row i is x row rows[i] / x_div and y row rows[i]
    const float* row_weight; // null, or a factor by y row
    int M, N, K, x_stride, x_div;
    float* part;             // null, or [splits][M][N]: sums of this part of K, to be added by split_sum
    int split_blocks;        // blocks of 128 of K a split
    int kb;                  // blocks of 128 of K that one staging of x covers, a multiple of D * WK
};

#define W_BACK 256.f         // the expanded weights are at 2^-8
#if FRAG == 70
#define NQ 4                 // 16-byte loads a lane for 16 rows by 128 of K
#define X_PAD 1              // 16-byte pieces that pad a row of x: no bank conflicts
#else
#define NQ 2
#define X_PAD 2
#endif

// 16 rows of W by 128 of K, times 8*XB rows of x. xs: the lane's place in the staged x, pitch in 16-byte pieces.
template <int XB, int NT>
DEV void block_mma(float (&acc)[(XB + 1) / 2][NT][8], const uint4 (&q)[NT][NQ], const u16 (&s)[NT][NQ], const uint4* xs,
                   int pitch, int sw)
{
    constexpr int MT = (XB + 1) / 2;
    u32 sa[NT][NQ], sb[NT][NQ];
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < NQ; i++) {
            u32 v = hmul2(scales2(s[t][i]), 0x74007400u);  // 2^14: scale * 2^6, exact
            sa[t][i] = __byte_perm(v, 0, 0x1010);
            sb[t][i] = __byte_perm(v, 0, 0x3232);
        }
#if FRAG == 70
#pragma unroll
    for (int u = 0; u < 4; u++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 b[MT][8];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                uint4 v = xs[i * 16 * pitch + u * 4 + 2 * h], w = xs[i * 16 * pitch + u * 4 + 2 * h + 1];
                b[i][0] = v.x; b[i][1] = v.y; b[i][2] = v.z; b[i][3] = v.w;
                b[i][4] = w.x; b[i][5] = w.y; b[i][6] = w.z; b[i][7] = w.w;
            }
#pragma unroll
            for (int t = 0; t < NT; t++) {
                u32 a[8], f = h ? sb[t][u] : sa[t][u];
                decode8(h ? q[t][u].z : q[t][u].x, a);
                decode8(h ? q[t][u].w : q[t][u].y, a + 4);
#pragma unroll
                for (int e = 0; e < 8; e++) a[e] = hmul2(a[e], f);
#pragma unroll
                for (int i = 0; i < MT; i++) wmma_mma(acc[i][t], a, b[i]);
            }
        }
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v[2 * MT];
#pragma unroll
        for (int j = 0; j < 2 * MT; j++) v[j] = j < XB ? xs[j * 8 * pitch + (i ^ sw)] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int t = 0; t < NT; t++) {
            u32 w[2][4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                decode8(i == 0 ? q[t][r].x : i == 1 ? q[t][r].y : i == 2 ? q[t][r].z : q[t][r].w, w[r]);
#pragma unroll
                for (int e = 0; e < 4; e++) w[r][e] = hmul2(w[r][e], i < 2 ? sa[t][r] : sb[t][r]);
            }
            u32 a0[8] = {w[0][0], w[1][0], w[0][1], w[1][1], w[0][0], w[1][0], w[0][1], w[1][1]};
            u32 a1[8] = {w[0][2], w[1][2], w[0][3], w[1][3], w[0][2], w[1][2], w[0][3], w[1][3]};
#pragma unroll
            for (int j = 0; j < MT; j++) {
                uint4 l = v[2 * j], h = v[2 * j + 1];
                u32 b0[8] = {l.x, l.y, h.x, h.y, l.x, l.y, h.x, h.y}, b1[8] = {l.z, l.w, h.z, h.w, l.z, l.w, h.z, h.w};
                wmma_mma(acc[j][t], a0, b0);
                wmma_mma(acc[j][t], a1, b1);
            }
        }
    }
#endif
}

// A block computes 8*XB rows of x by 16*NT*WR rows of W; WK warps share the rows of W and split K; D blocks of K are in
// flight. m0: first row of the block in x (or in p.rows), p.M: rows there are. KB 0: x is staged p.kb blocks of K at a
// time; otherwise KB blocks at a time into two buffers, the next while this one is used. PAIR: half of the rows of W are
// rows n0.. (gate), half are those N further (up), and what is written is silu(gate) * up.
template <int XB, int NT, int WR, int WK, int D, int KB, bool PAIR>
DEV void gemm_body(const Gemm& p, int m0, int n0, int split)
{
    static_assert(!PAIR || NT % 2 == 0, "a warp has the up row of each of its gate rows");
    constexpr int NW = WR * WK, T = NW * 32, MT = (XB + 1) / 2, BN = 16 * NT * WR, NH = PAIR ? NT / 2 : NT, BO = 16 * NH * WR, BM = FRAG == 70 ? 16 * MT : 8 * XB;
    extern __shared__ uint4 smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, wk = warp % WK, wr = warp / WK;
    const int units = (p.K + 31) >> 5, u0 = split * p.split_blocks * 4, u1 = min(units, u0 + p.split_blocks * 4);
    const int blocks = (u1 - u0 + 3) >> 2, pitch = (KB ? KB : p.kb) * 16 + X_PAD;
#if FRAG == 70
    constexpr int RT = 1;
    const int c = 0, sw = 0, w_row = frag_a(lane), x_row = frag_b(lane);
#else
    constexpr int RT = 2;
    const int c = lane & 3, sw = c >> 1, w_row = lane >> 2, x_row = lane >> 2;
#endif
    const uint4* wp[NT][RT];
    const u16* sp[NT][RT];
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int r = 0; r < RT; r++) {
            size_t row = min(n0 + (wr * NH + t % NH) * 16 + w_row + 8 * r, p.N - 1) + (t < NH ? 0 : p.N);
            wp[t][r] = p.qw + row * units + u0 + c + wk * 4;
            sp[t][r] = p.sc + row * units + u0 + c + wk * 4;
        }
    int left = u1 - u0 - c - wk * 4;
    uint4 q[D][NT][NQ];
    u16 s[D][NT][NQ];
    auto load = [&](int ahead, uint4 (&a)[NT][NQ], u16 (&b)[NT][NQ]) {
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int i = 0; i < NQ; i++) {
                int r = i % RT, u = ahead + i / RT;
                a[t][i] = left > u ? ld_stream(wp[t][r] + u) : make_uint4(0, 0, 0, 0);
                b[t][i] = left > u ? __ldg(sp[t][r] + u) : (u16)0;
            }
    };
#pragma unroll
    for (int d = 0; d < D; d++) load(d * WK * 4, q[d], s[d]);

    float acc[MT][NT][8];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int e = 0; e < 8; e++) acc[i][t][e] = 0.f;

    int block = wk;
    auto compute = [&](const uint4* xs, int end) {
        for (; block < end; block += D * WK) {
#pragma unroll
            for (int d = 0; d < D; d++) {
                if (d == 0 || block + d * WK < end) block_mma<XB, NT>(acc, q[d], s[d], xs + d * WK * 16, pitch, sw);
                load((d + D) * WK * 4, q[d], s[d]);
            }
            xs += D * WK * 16;
            left -= D * WK * 4;
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int r = 0; r < RT; r++) { wp[t][r] += D * WK * 4; sp[t][r] += D * WK * 4; }
        }
    };
    const uint4* my_x = smem + x_row * pitch + c * 4 + wk * 16;
    auto row_of = [&](int m) {
        return p.x + u0 * 32 + (m < p.M ? (size_t)(p.rows ? p.rows[m] / p.x_div : m) * p.x_stride : 0);
    };
    const int k_left = p.K - u0 * 32;
    auto place = [&](int m, int i) { return m * pitch + (FRAG == 70 ? i : i ^ ((i >> 3) & 1)); };
    if (KB == 0) {
        for (int b0 = 0; b0 < blocks; b0 += p.kb) {
            if (b0) __syncthreads();
            const int count = min(p.kb, blocks - b0) * 16;
            for (int m = warp; m < BM; m += NW) {
                const u16* from = row_of(m0 + m);
                for (int i = lane; i < count; i += 32) {
                    int k = b0 * 128 + i * 8;
                    bool there = m0 + m < p.M && k < k_left;
                    smem[place(m, i)] = there ? __ldg((const uint4*)(from + k)) : make_uint4(0, 0, 0, 0);
                }
            }
            __syncthreads();
            compute(my_x, min(blocks, b0 + p.kb));
        }
    } else {
        constexpr int ROW = KB ? KB * 16 : 1, XR = (BM * ROW + T - 1) / T;
        const int buffer = BM * pitch;
        const u16* from[XR];
        uint4 v[XR];
#pragma unroll
        for (int i = 0; i < XR; i++) {
            int m = m0 + (tid + i * T) / ROW;
            from[i] = tid + i * T < BM * ROW && m < p.M ? row_of(m) + (tid + i * T) % ROW * 8 : nullptr;
        }
        auto load_x = [&](int b0) {
#pragma unroll
            for (int i = 0; i < XR; i++) {
                bool there = from[i] && b0 * 128 + (tid + i * T) % ROW * 8 < k_left;
                v[i] = there ? __ldg((const uint4*)(from[i] + b0 * 128)) : make_uint4(0, 0, 0, 0);
            }
        };
        auto store_x = [&](int at) {
#pragma unroll
            for (int i = 0; i < XR; i++)
                if (tid + i * T < BM * ROW) smem[at + place((tid + i * T) / ROW, (tid + i * T) % ROW)] = v[i];
        };
        load_x(0);
        store_x(0);
        for (int b0 = 0, at = 0; b0 < blocks; b0 += KB, at = buffer - at) {
            __syncthreads();  // this buffer is full, and nobody reads the other one any more
            if (b0 + KB < blocks) load_x(b0 + KB);
            compute(my_x + at, min(blocks, b0 + KB));
            if (b0 + KB < blocks) store_x(buffer - at);
        }
    }

    // ---- sum over the warps that split K, in order, and write ----
    __syncthreads();
    constexpr int CP = BN + 4;
    float* cs = (float*)smem;  // [WK][16 * MT][CP]
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
            float* tile = cs + (wk * 16 * MT + i * 16) * CP + (t < NH ? 0 : BO) + (wr * NH + t % NH) * 16;
#if FRAG == 80
            if (XB == 1) {  // only columns 0..7: the compiler then drops the tensor instructions of the others
                float* to = tile + 2 * c * CP + x_row;
                to[0] = acc[i][t][0];
                to[CP] = acc[i][t][1];
                to[8] = acc[i][t][2];
                to[CP + 8] = acc[i][t][3];
                continue;
            }
#endif
            wmma_store(tile, acc[i][t], CP);
        }
    __syncthreads();
    for (int i = tid; i < 8 * XB * BO; i += T) {
        int r = i / BO, j = i % BO, m = m0 + r, n = n0 + j;
        if (m >= p.M || n >= p.N) continue;
        float v = 0.f;
#pragma unroll
        for (int w = 0; w < WK; w++) v += cs[(w * 16 * MT + r) * CP + j];
        if (p.part) {
            p.part[((size_t)split * p.M + m) * p.N + n] = v;
            continue;
        }
        int row = p.rows ? p.rows[m] : m;
        v *= p.gs[n] * W_BACK;
        if (PAIR) {
            float up = 0.f;
#pragma unroll
            for (int w = 0; w < WK; w++) up += cs[(w * 16 * MT + r) * CP + BO + j];
            v = v / (1.f + __expf(-v)) * (up * p.gs[n + p.N] * W_BACK);
        }
        if (p.row_weight) v *= p.row_weight[row];
        if (p.bias) v += hf(p.bias[n]);
        p.y[(size_t)row * p.N + n] = fh(v);
    }
}

#define GEMM(XB, NT, WR, WK, D, KB, OCC)                                                                                \
    extern "C" __global__ void __launch_bounds__(WR * WK * 32, OCC)                                                     \
        gemm_xb##XB##_nt##NT##_wr##WR##_wk##WK##_d##D##_kb##KB##_o##OCC(                                                \
        const uint4* qw, const u16* sc, const float* gs, const u16* x, const u16* bias, u16* y, int M, int N, int K,    \
        int x_stride, float* part, int split_blocks, int kb)                                                            \
    {                                                                                                                   \
        Gemm p = {qw, sc, gs, x, bias, y, nullptr, nullptr, M, N, K, x_stride, 1, part, split_blocks, kb};              \
        gemm_body<XB, NT, WR, WK, D, KB, false>(p, blockIdx.y * 8 * XB, blockIdx.x * 16 * NT * WR, blockIdx.z);         \
    }

// y[m][n] = sum over the splits, in order, * gs[n] (+ bias[n]); grid (N / 256, M).
extern "C" __global__ void __launch_bounds__(256) split_sum(
    const float* part, const float* gs, const u16* bias, u16* y, int splits, int M, int N)
{
    int n = blockIdx.x * 256 + threadIdx.x, m = blockIdx.y;
    if (n >= N) return;
    float v = 0.f;
#pragma unroll 4
    for (int s = 0; s < splits; s++) v += __ldg(part + ((size_t)s * M + m) * N + n);
    v *= gs[n] * W_BACK;
    if (bias) v += hf(bias[n]);
    y[(size_t)m * N + n] = fh(v);
}

// out[n - n0][k] = half(e2m1 * scale * gs[n]) of rows n0 .. n0+rows: expansion for cuBLAS. A thread makes 8 values.
extern "C" __global__ void __launch_bounds__(256) dequant(
    const u32* qw, const u8* sc, const float* gs, u16* out, int n0, int rows, int K)
{
    int words = ((K + 31) >> 5) * 4, r = blockIdx.y * blockDim.y + threadIdx.y;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows || i * 8 >= K) return;
    size_t src = (size_t)(n0 + r) * words + i;
    u32 w[4], o[4];
    decode8(__ldg(qw + src), w);
    float f = h2f((u32)__ldg(sc + (src >> 1)) << 7).x * gs[n0 + r] * (float)(1 << (W_EXP + S_EXP));
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float2 v = h2f(w[e]);
        o[e] = fh2(v.x * f, v.y * f);
    }
    ((uint4*)(out + (size_t)r * K))[i] = make_uint4(o[0], o[1], o[2], o[3]);
}

// ---- experts, many pairs: rows sorted by expert, one block a tile of 8*XB rows ----
// offsets[e], offsets[e+1]: where the pairs of local expert e lie in `rows`; tile_start[e]: tiles before expert e
// (tile_start[E] is their number). Blocks past it end at once. N: columns of y.
template <int XB, int NT, int WR, int D, int KB, bool PAIR>
DEV void moe_gemm(Gemm p, const int* offsets, const int* tile_start, int E)
{
    int tile = blockIdx.y;
    if (tile >= tile_start[E]) return;
    int lo = 0, hi = E;  // the last expert whose tile_start <= tile
    while (hi - lo > 1) {
        int mid = (lo + hi) >> 1;
        if (tile_start[mid] <= tile) lo = mid; else hi = mid;
    }
    size_t first = (size_t)lo * p.N * (PAIR ? 2 : 1);
    int units = (p.K + 31) >> 5;
    p.qw += first * units;
    p.sc += first * units;
    p.gs += first;
    p.M = offsets[lo + 1];
    gemm_body<XB, NT, WR, 1, D, KB, PAIR>(p, offsets[lo] + (tile - tile_start[lo]) * 8 * XB,
                                          blockIdx.x * 16 * (PAIR ? NT / 2 : NT) * WR, 0);
}
#define MOE_GEMM(XB, NT, WR, D, KB, OCC, PAIR)                                                                          \
    extern "C" __global__ void __launch_bounds__(WR * 32, OCC)                                                          \
        moe_gemm_xb##XB##_nt##NT##_wr##WR##_d##D##_kb##KB##_o##OCC##_p##PAIR(                                           \
        const uint4* qw, const u16* sc, const float* gs, const u16* x, u16* y, const int* rows,                         \
        const float* row_weight, const int* offsets, const int* tile_start, int E, int N, int K, int x_stride,          \
        int x_div, int kb)                                                                                              \
    {                                                                                                                   \
        Gemm p = {qw, sc, gs, x, nullptr, y, rows, row_weight, 0, N, K, x_stride, x_div, nullptr, 1 << 20, kb};         \
        moe_gemm<XB, NT, WR, D, KB, PAIR>(p, offsets, tile_start, E);                                                   \
    }
