// NVFP4 matrix times 1..4 vectors, one pass over the packed weights.
#include "sm70_common.cuh"

struct Gemv {
    const uint4* qw;    // [N][K/32] packed words, K rounded up to 32
    const u16* sc;      // [N][K/32] pairs of e4m3 scales
    const float* gs;    // [N] global scale of the row
    const u16* x;       // [M][x_stride] half
    const u16* bias;    // [N] half or null
    u16* y;             // [M][N] half
    int N, K, x_stride;
    int seg_steps;      // steps of K that one staging of x in shared memory covers
};

// Part of K in shared memory: per group of KL units (32 activations each) the units' j-th 16 bytes lie side by side, so
// the lanes of a warp read without bank conflicts; then one float2 a unit, what undoes the scaling of its two groups.
template <int KL>
DEV void stage_x(uint4* xs, float* xf, const u16* x, int unit0, int units, int K, int tid, int threads)
{
    for (int c = tid; c < units * 2; c += threads) {
        int unit = c >> 1, g = c & 1, k = (unit0 + unit) * 32 + g * 16;
        uint4 v0 = make_uint4(0, 0, 0, 0), v1 = v0;
        if (k < K) {
            v0 = __ldg((const uint4*)(x + k));
            v1 = __ldg((const uint4*)(x + k) + 1);
        }
        scale_group(v0, v1, xf + c);
        uint4* to = xs + ((unit / KL) * 4 + 2 * g) * KL + (unit & (KL - 1));
        to[0] = v0;
        to[KL] = v1;
    }
}

// acc[m][r] += one unit (32 weights) of R rows times M vectors. xs, xf: the lane's place in the staged part.
template <int M, int KL, int R>
DEV void unit_fma(float (&acc)[M][R], const uint4 (&q)[R], const u16 (&s)[R], const uint4* xs, int xs_stride,
                  const float2* xf, int xf_stride)
{
    float2 sf[R], xb[M];
#pragma unroll
    for (int r = 0; r < R; r++) sf[r] = h2f(scales2(s[r]));
#pragma unroll
    for (int m = 0; m < M; m++) xb[m] = xf[m * xf_stride];
#pragma unroll
    for (int g = 0; g < 2; g++) {
        u32 a[M][R];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 xv[M];
#pragma unroll
            for (int m = 0; m < M; m++) xv[m] = xs[m * xs_stride + (2 * g + h) * KL];
#pragma unroll
            for (int r = 0; r < R; r++) {
                u32 w[4];
                decode8(g ? (h ? q[r].w : q[r].z) : (h ? q[r].y : q[r].x), w);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    a[m][r] = h ? hfma2(w[0], xv[m].x, a[m][r]) : hmul2(w[0], xv[m].x);
                    a[m][r] = hfma2(w[1], xv[m].y, a[m][r]);
                    a[m][r] = hfma2(w[2], xv[m].z, a[m][r]);
                    a[m][r] = hfma2(w[3], xv[m].w, a[m][r]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                float2 f = h2f(a[m][r]);
                acc[m][r] += ((g ? sf[r].y : sf[r].x) * (g ? xb[m].y : xb[m].x)) * (f.x + f.y);
            }
    }
}

// The lanes of a warp: KL along K (32 weights, 16 bytes each), 32/KL along N; R such row sets a lane; WK warps share the
// rows and split K, NW/WK warps have rows of their own; D steps are in flight. PAIR: rows n and n+N are the gate and the
// up projection, and what is written is silu(gate) * up.
template <int M, int KL, int R, int WK, int NW, int D, bool PAIR>
DEV void gemv_body(const Gemv& p, int x_row, int y_row)
{
    constexpr int RW = 32 / KL, ROWS = RW * R * (NW / WK), T = NW * 32, RP = PAIR ? R / 2 : R;
    constexpr int OUT_ROWS = PAIR ? ROWS / 2 : ROWS;
    extern __shared__ uint4 smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int kp = lane & (KL - 1), rl = lane / KL, wk = warp % WK, wr = warp / WK;
    const int units = (p.K + 31) >> 5, steps = (units + KL - 1) / KL, seg_units = p.seg_steps * KL;
    uint4* xs = smem;                                        // [M][seg_units * 4]
    float* xf = (float*)(smem + M * seg_units * 4);          // [M][seg_units * 2]
    float* red = xf + M * seg_units * 2;                     // [WK][M][ROWS]

    const uint4* wp[R];
    const u16* sp[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        int row = blockIdx.x * OUT_ROWS + wr * (RW * RP) + (r % RP) * RW + rl;
        row = min(row, p.N - 1) + ((PAIR && r >= RP) ? p.N : 0);
        wp[r] = p.qw + (size_t)row * units + kp + wk * KL;
        sp[r] = p.sc + (size_t)row * units + kp + wk * KL;
    }
    int left = units - kp - wk * KL;  // what remains of K for this lane, in units
    uint4 q[D][R];
    u16 s[D][R];
    auto load = [&](int ahead, uint4 (&a)[R], u16 (&b)[R]) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            a[r] = left > ahead ? ld_stream(wp[r] + ahead) : make_uint4(0, 0, 0, 0);
            b[r] = left > ahead ? __ldg(sp[r] + ahead) : (u16)0;
        }
    };
    // The first weights are on their way while x is staged.
#pragma unroll
    for (int d = 0; d < D; d++) load(d * WK * KL, q[d], s[d]);

    float acc[M][R];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++) acc[m][r] = 0.f;

    int step = wk;  // seg_steps is a multiple of D * WK
    for (int s0 = 0; s0 < steps; s0 += p.seg_steps) {
        if (s0) __syncthreads();
#pragma unroll
        for (int m = 0; m < M; m++)
            stage_x<KL>(xs + m * seg_units * 4, xf + m * seg_units * 2, p.x + (size_t)(x_row + m) * p.x_stride,
                        s0 * KL, min(seg_units, (steps - s0) * KL), p.K, tid, T);
        __syncthreads();
        const int end = min(steps, s0 + p.seg_steps);
        const uint4* xp = xs + wk * 4 * KL + kp;
        const float2* fp = (const float2*)xf + wk * KL + kp;
        for (; step < end; step += D * WK) {
#pragma unroll
            for (int d = 0; d < D; d++) {
                if (d == 0 || step + d * WK < end)
                    unit_fma<M, KL, R>(acc, q[d], s[d], xp + d * WK * 4 * KL, seg_units * 4, fp + d * WK * KL, seg_units);
                load((d + D) * WK * KL, q[d], s[d]);
            }
            xp += D * WK * 4 * KL;
            fp += D * WK * KL;
            left -= D * WK * KL;
#pragma unroll
            for (int r = 0; r < R; r++) { wp[r] += D * WK * KL; sp[r] += D * WK * KL; }
        }
    }

    // ---- sum: lanes, then warps in order ----
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++) acc[m][r] = warp_sum(acc[m][r], KL);
    // red[wk][m][local row], local rows of the second (up) half after those of the first
    if (kp == 0)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                int lr = wr * (RW * RP) + (r % RP) * RW + rl + ((PAIR && r >= RP) ? OUT_ROWS : 0);
                red[(wk * M + m) * ROWS + lr] = acc[m][r];
            }
    __syncthreads();
    for (int i = tid; i < M * OUT_ROWS; i += T) {
        int m = i / OUT_ROWS, lr = i % OUT_ROWS, row = blockIdx.x * OUT_ROWS + lr;
        if (row >= p.N) continue;
        float v = 0.f;
#pragma unroll
        for (int w = 0; w < WK; w++) v += red[(w * M + m) * ROWS + lr];
        v *= p.gs[row];
        if (PAIR) {
            float up = 0.f;
#pragma unroll
            for (int w = 0; w < WK; w++) up += red[(w * M + m) * ROWS + OUT_ROWS + lr];
            up *= p.gs[row + p.N];
            v = v / (1.f + __expf(-v)) * up;
        } else if (p.bias) {
            v += hf(p.bias[row]);
        }
        p.y[(size_t)(y_row + m) * p.N + row] = fh(v);
    }
}

#define GEMV(M, KL, R, WK, NW, D, OCC)                                                                                  \
    extern "C" __global__ void __launch_bounds__(NW * 32, OCC) gemv_m##M##_kl##KL##_r##R##_wk##WK##_nw##NW##_d##D##_o##OCC( \
        const uint4* qw, const u16* sc, const float* gs, const u16* x, const u16* bias, u16* y, int N, int K,           \
        int x_stride, int seg_steps)                                                                                    \
    {                                                                                                                   \
        Gemv p = {qw, sc, gs, x, bias, y, N, K, x_stride, seg_steps};                                                   \
        gemv_body<M, KL, R, WK, NW, D, false>(p, 0, 0);                                                                 \
    }
