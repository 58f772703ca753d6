// What stands between the matrix products: norms, rotary embedding, SiLU, sums, experts' order, and a matrix in half
// precision.
// Half in and out, float32 inside; sums have a fixed order.
#include "sm70_common.cuh"

DEV float block_sum(float v) {  // every thread gets it; blockDim.x is a multiple of 32
    __shared__ float part[32];
    v = warp_sum(v, 32);
    if (!(threadIdx.x & 31)) part[threadIdx.x >> 5] = v;
    __syncthreads();
    float s = 0.f;
    for (int w = 0; w < blockDim.x >> 5; w++) s += part[w];
    return s;
}
DEV void unpack8(uint4 v, float* f) {
    float2 a = h2f(v.x), b = h2f(v.y), c = h2f(v.z), d = h2f(v.w);
    f[0] = a.x; f[1] = a.y; f[2] = b.x; f[3] = b.y; f[4] = c.x; f[5] = c.y; f[6] = d.x; f[7] = d.y;
}
DEV uint4 pack8(const float* f) { return make_uint4(fh2(f[0], f[1]), fh2(f[2], f[3]), fh2(f[4], f[5]), fh2(f[6], f[7])); }

// out[row] = x[row] / sqrt(mean(x^2) + eps) * weight. With residual: x + residual is normed, residual becomes that sum.
// A block is a row; H a multiple of 8; strides in halves.
extern "C" __global__ void __launch_bounds__(1024) rms_norm(
    u16* out, const u16* x, u16* residual, const u16* weight, float eps, int H, int x_stride, int out_stride)
{
    extern __shared__ uint4 row[];
    const uint4* in = (const uint4*)(x + (size_t)blockIdx.x * x_stride);
    uint4* res = residual ? (uint4*)(residual + (size_t)blockIdx.x * H) : nullptr;
    float sum = 0.f, f[8], g[8];
    for (int i = threadIdx.x; i < H / 8; i += blockDim.x) {
        uint4 v = in[i];
        if (res) {
            unpack8(v, f);
            unpack8(res[i], g);
#pragma unroll
            for (int e = 0; e < 8; e++) f[e] += g[e];
            v = pack8(f);
            res[i] = v;
        }
        row[i] = v;
        unpack8(v, f);
#pragma unroll
        for (int e = 0; e < 8; e++) sum += f[e] * f[e];
    }
    float scale = rsqrtf(block_sum(sum) / H + eps);
    uint4* to = (uint4*)(out + (size_t)blockIdx.x * out_stride);
    for (int i = threadIdx.x; i < H / 8; i += blockDim.x) {
        unpack8(row[i], f);
        if (weight) unpack8(((const uint4*)weight)[i], g);
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = f[e] * scale * (weight ? g[e] : 1.f);
        to[i] = pack8(f);
    }
}

// out[row][i] = silu(x[row][i]) * x[row][I + i]; I a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) silu_and_mul(u16* out, const u16* x, int rows, int I)
{
    int per_row = I / 8;
    size_t n = (size_t)rows * per_row;
    for (size_t c = (size_t)blockIdx.x * 256 + threadIdx.x; c < n; c += (size_t)gridDim.x * 256) {
        size_t r = c / per_row, i = c % per_row;
        const uint4* in = (const uint4*)(x + r * 2 * I);
        float g[8], u[8];
        unpack8(in[i], g);
        unpack8(in[i + per_row], u);
#pragma unroll
        for (int e = 0; e < 8; e++) g[e] = g[e] / (1.f + __expf(-g[e])) * u[e];
        ((uint4*)(out + r * I))[i] = pack8(g);
    }
}

// In place on q [tokens][q_heads][D] and k (may be null); cos_sin [positions][rot]: cosines, then sines; rot <= D even.
// A block is a token; strides in halves.
extern "C" __global__ void __launch_bounds__(256) rotary(
    const u64* positions, u16* q, u16* k, const u16* cos_sin, int q_heads, int k_heads, int D, int rot, int q_stride,
    int k_stride, int neox)
{
    const u16* cs = cos_sin + (size_t)positions[blockIdx.x] * rot;
    const int half = rot / 2;
    for (int i = threadIdx.x; i < (q_heads + k_heads) * half; i += blockDim.x) {
        int head = i / half, j = i % half;
        u16* p = head < q_heads ? q + (size_t)blockIdx.x * q_stride + head * D
                                : k + (size_t)blockIdx.x * k_stride + (head - q_heads) * D;
        int a = neox ? j : 2 * j, b = neox ? j + half : 2 * j + 1;
        float c = hf(cs[j]), s = hf(cs[half + j]), x = hf(p[a]), y = hf(p[b]);
        p[a] = fh(x * c - y * s);
        p[b] = fh(y * c + x * s);
    }
}

// y[token] = sum over t of x[token][t], t ascending; H a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) moe_sum(u16* y, const u16* x, int tokens, int topk, int H)
{
    int per_row = H / 8;
    size_t n = (size_t)tokens * per_row;
    for (size_t c = (size_t)blockIdx.x * 256 + threadIdx.x; c < n; c += (size_t)gridDim.x * 256) {
        size_t r = c / per_row, i = c % per_row;
        float s[8] = {0, 0, 0, 0, 0, 0, 0, 0}, f[8];
        for (int t = 0; t < topk; t++) {
            unpack8(((const uint4*)(x + (r * topk + t) * H))[i], f);
#pragma unroll
            for (int e = 0; e < 8; e++) s[e] += f[e];
        }
        ((uint4*)(y + r * H))[i] = pack8(s);
    }
}

// Pairs (token * topk + t) sorted by expert, each expert's padded with `pairs` to whole blocks of `block_size`; stable.
// expert_of[b]: expert of block b; total: padded length. One block of 1024 threads; E <= 1024.
extern "C" __global__ void __launch_bounds__(1024) moe_align(
    const int* ids, int* sorted, int* expert_of, int* total, int pairs, int E, int block_size, int sorted_len, int blocks)
{
    __shared__ int start[1025];
    int e = threadIdx.x, count = 0;
    if (e < E)
        for (int i = 0; i < pairs; i++) count += __ldg(ids + i) == e;
    start[e + 1] = (count + block_size - 1) / block_size * block_size;
    if (!e) start[0] = 0;
    for (int i = e; i < sorted_len; i += 1024) sorted[i] = pairs;
    __syncthreads();
    if (!e)
        for (int i = 0; i < E; i++) start[i + 1] += start[i];
    __syncthreads();
    if (e < E) {
        int at = start[e];
        for (int b = at / block_size; b < start[e + 1] / block_size; b++) expert_of[b] = e;
        for (int i = 0; i < pairs; i++)
            if (__ldg(ids + i) == e) sorted[at++] = i;
    }
    for (int b = start[E] / block_size + e; b < blocks; b += 1024) expert_of[b] = -1;
    if (!e) total[0] = start[E];
}

// Up to 8192 pairs sorted by their (mapped) expert, stable: order[offsets[e] ..] are those of expert e, in tiles of
// `tile_rows` of which tiles[e] is its first. Pairs of no expert of this rank are left out. 1024 threads; E <= 1024.
// A thread looks for one expert's pairs in one part of them.
extern "C" __global__ void __launch_bounds__(1024) moe_sort(
    const int* ids, const int* expert_map, int* order, int* offsets, int* tiles, int pairs, int E, int tile_rows)
{
    __shared__ int4 list[2048];
    __shared__ int counts[1024], start[1024], tile[1024];
    const int t = threadIdx.x, quads = (pairs + 3) / 4;
    int width = 32;
    while (width < E) width *= 2;
    const int e = t & (width - 1), part = t / width, parts = 1024 / width;
    const int from = quads * part / parts, to = quads * (part + 1) / parts;
    for (int i = t; i < 4 * quads; i += 1024) {
        int id = i < pairs ? ids[i] : -1;
        ((int*)list)[i] = expert_map && id >= 0 ? expert_map[id] : id;
    }
    __syncthreads();
    int count = 0;
#pragma unroll 4
    for (int i = from; i < to; i++) {
        int4 q = list[i];
        count += (q.x == e) + (q.y == e) + (q.z == e) + (q.w == e);
    }
    counts[t] = count;
    __syncthreads();
    int all = 0, before = 0;
    for (int i = 0; i < parts; i++) {
        if (i == part) before = all;
        all += counts[i * width + e];
    }
    const int tiles_here = (all + tile_rows - 1) / tile_rows;
    if (!part) {
        start[e] = all;
        tile[e] = tiles_here;
    }
    for (int o = 1; o < width; o <<= 1) {  // sums over the experts up to this one
        __syncthreads();
        int a = !part && e >= o ? start[e - o] : 0, b = !part && e >= o ? tile[e - o] : 0;
        __syncthreads();
        if (!part) {
            start[e] += a;
            tile[e] += b;
        }
    }
    __syncthreads();
    if (e >= E) return;
    int at = start[e] - all + before;
    if (!part) {
        offsets[e] = at;
        tiles[e] = tile[e] - tiles_here;
        if (e == E - 1) { offsets[E] = start[e]; tiles[E] = tile[e]; }
    }
    for (int i = from; i < to; i++) {
        int4 q = list[i];
        if (q.x == e) order[at++] = 4 * i;
        if (q.y == e) order[at++] = 4 * i + 1;
        if (q.z == e) order[at++] = 4 * i + 2;
        if (q.w == e) order[at++] = 4 * i + 3;
    }
}

// ---- a half matrix times 1..8 vectors: 16 bytes of a row a lane, KL lanes along K, R row sets, WK warps split K ----
template <int M, int KL, int R, int WK, int NW, int D>
DEV void hgemv_body(const u16* w, const u16* x, const u16* bias, u16* y, int N, int K, int x_stride)
{
    constexpr int RW = 32 / KL, ROWS = RW * R * (NW / WK), T = NW * 32;
    extern __shared__ uint4 smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, wk = warp % WK, wr = warp / WK;
    const int kp = lane & (KL - 1), rl = lane / KL, units = K / 8, stride = M * units;
    uint4* xs = smem;                        // [M][units]
    float* red = (float*)(smem + stride);    // [WK][M][ROWS]
    const uint4* wp[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        int row = min((int)blockIdx.x * ROWS + wr * RW * R + r * RW + rl, N - 1);
        wp[r] = (const uint4*)w + (size_t)row * units + kp + wk * KL;
    }
    int left = units - kp - wk * KL;
    uint4 q[D][R];
    auto load = [&](int ahead, uint4 (&a)[R]) {
#pragma unroll
        for (int r = 0; r < R; r++) a[r] = left > ahead ? ld_stream(wp[r] + ahead) : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int d = 0; d < D; d++) load(d * WK * KL, q[d]);
    for (int i = tid; i < stride; i += T) xs[i] = __ldg((const uint4*)(x + (size_t)(i / units) * x_stride) + i % units);
    __syncthreads();
    float acc[M][R];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++) acc[m][r] = 0.f;
    for (int u = wk * KL + kp; left > 0; u += D * WK * KL) {
#pragma unroll
        for (int d = 0; d < D; d++) {
            int at = u + d * WK * KL;
            if (at < units) {
                float f[R][8];
#pragma unroll
                for (int r = 0; r < R; r++) unpack8(q[d][r], f[r]);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    float g[8];
                    unpack8(xs[m * units + at], g);
#pragma unroll
                    for (int r = 0; r < R; r++)
#pragma unroll
                        for (int e = 0; e < 8; e++) acc[m][r] += f[r][e] * g[e];
                }
            }
            load((d + D) * WK * KL, q[d]);
        }
        left -= D * WK * KL;
#pragma unroll
        for (int r = 0; r < R; r++) wp[r] += D * WK * KL;
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++) {
            float v = warp_sum(acc[m][r], KL);
            if (kp == 0) red[(wk * M + m) * ROWS + wr * RW * R + r * RW + rl] = v;
        }
    __syncthreads();
    for (int i = tid; i < M * ROWS; i += T) {
        int m = i / ROWS, lr = i % ROWS, row = blockIdx.x * ROWS + lr;
        if (row >= N) continue;
        float v = bias ? hf(bias[row]) : 0.f;
#pragma unroll
        for (int k = 0; k < WK; k++) v += red[(k * M + m) * ROWS + lr];
        y[(size_t)m * N + row] = fh(v);
    }
}
#define HGEMV(M, KL, R, WK, NW, D, OCC)                                                                                 \
    extern "C" __global__ void __launch_bounds__(NW * 32, OCC) hgemv_m##M##_kl##KL##_r##R##_wk##WK##_nw##NW##_d##D##_o##OCC( \
        const u16* w, const u16* x, const u16* bias, u16* y, int N, int K, int x_stride)                                \
    {                                                                                                                   \
        hgemv_body<M, KL, R, WK, NW, D>(w, x, bias, y, N, K, x_stride);                                                 \
    }
