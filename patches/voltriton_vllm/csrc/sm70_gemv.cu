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

// The lanes of a warp: KL along K (32 weights, 16 bytes each), 32/KL along N; R such row sets a lane; WK warps share the
// rows and split K, NW/WK warps have rows of their own; U steps are loaded ahead. PAIR: rows n and n+N are the gate and
// the up projection, and what is written is silu(gate) * up.
template <int M, int KL, int R, int WK, int NW, int U, bool PAIR>
DEV void gemv_body(const Gemv& p, int x_row, int y_row)
{
    constexpr int RW = 32 / KL, ROWS = RW * R * (NW / WK), T = NW * 32, RP = PAIR ? R / 2 : R;
    extern __shared__ uint4 smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int kp = lane & (KL - 1), rl = lane / KL, wk = warp % WK, wr = warp / WK;
    const int units = (p.K + 31) >> 5, steps = (units + KL - 1) / KL;
    const int seg_chunks = p.seg_steps * KL * 4;
    uint4* xs = smem;
    float* red = (float*)(smem + M * seg_chunks);
    u32* maxes = (u32*)red;

    constexpr int OUT_ROWS = PAIR ? ROWS / 2 : ROWS;
    int off[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        int row = blockIdx.x * OUT_ROWS + wr * (RW * RP) + (r % RP) * RW + rl;
        row = min(row, p.N - 1) + ((PAIR && r >= RP) ? p.N : 0);
        off[r] = row * units + kp;
    }
    float tot[M][R];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++) tot[m][r] = 0.f;

    uint4 q[U][R], nq[U][R];
    u16 s[U][R], ns[U][R];
    auto load = [&](int step0, uint4 (&a)[U][R], u16 (&b)[U][R]) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            int uo = (step0 + u) * KL;
            bool ok = uo + kp < units;
#pragma unroll
            for (int r = 0; r < R; r++) {
                a[u][r] = ok ? ld_stream(p.qw + off[r] + uo) : make_uint4(0, 0, 0, 0);
                b[u][r] = ok ? __ldg(p.sc + off[r] + uo) : (u16)0;
            }
        }
    };
    load(wk * U, q, s);

    for (int s0 = 0; s0 < steps; s0 += p.seg_steps) {
        // ---- x to shared memory, scaled by a power of two per vector ----
        u32 mx[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            mx[m] = 0;
            for (int c = tid; c < seg_chunks; c += T) {
                int k = (s0 * KL * 4 + c) * 8;
                uint4 v = k < p.K ? __ldg((const uint4*)(p.x + (size_t)(x_row + m) * p.x_stride + k)) : make_uint4(0, 0, 0, 0);
                mx[m] = habsmax(habsmax(habsmax(habsmax(mx[m], v.x), v.y), v.z), v.w);
                xs[m * seg_chunks + ((c >> 2) / KL * 4 + (c & 3)) * KL + ((c >> 2) & (KL - 1))] = v;
            }
            mx[m] = warp_max(mx[m]);
            if (!lane) maxes[warp * M + m] = mx[m];
        }
        __syncthreads();
        float back[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            u32 v = 0;
#pragma unroll
            for (int w = 0; w < NW; w++) v = max(v, maxes[w * M + m]);
            int e = x_exponent(v);
            back[m] = exp2i(W_EXP + S_EXP - e);
            for (int c = tid; c < seg_chunks; c += T) {
                int i = m * seg_chunks + ((c >> 2) / KL * 4 + (c & 3)) * KL + ((c >> 2) & (KL - 1));
                xs[i] = scale_x(xs[i], e);
            }
        }
        __syncthreads();

        // ---- the weights of this segment ----
        float acc[M][R];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < R; r++) acc[m][r] = 0.f;
        const int end = min(steps, s0 + p.seg_steps);
        for (int b = s0 + wk * U; b < end; b += WK * U) {
            // The next batch: of this segment, or the first of the next one.
            int nb = b + WK * U;
            if (nb >= end) nb = s0 + p.seg_steps + wk * U;
            load(nb, nq, ns);
#pragma unroll
            for (int u = 0; u < U; u++) {
                const uint4* xb = xs + (b - s0 + u) * 4 * KL + kp;
                if (U > 1 && b + u >= end) break;
                float2 sf[R];
#pragma unroll
                for (int r = 0; r < R; r++) sf[r] = h2f(scales2(s[u][r]));
#pragma unroll
                for (int g = 0; g < 2; g++) {
                    u32 a[M][R];
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        uint4 xv[M];
#pragma unroll
                        for (int m = 0; m < M; m++) xv[m] = xb[m * seg_chunks + (2 * g + h) * KL];
#pragma unroll
                        for (int r = 0; r < R; r++) {
                            u32 w[4];
                            decode8(g ? (h ? q[u][r].w : q[u][r].z) : (h ? q[u][r].y : q[u][r].x), w);
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
                            acc[m][r] += (g ? sf[r].y : sf[r].x) * (f.x + f.y);
                        }
                }
            }
#pragma unroll
            for (int u = 0; u < U; u++)
#pragma unroll
                for (int r = 0; r < R; r++) { q[u][r] = nq[u][r]; s[u][r] = ns[u][r]; }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < R; r++) tot[m][r] += acc[m][r] * back[m];
        __syncthreads();  // x, and the maxima, are overwritten next
    }

    // ---- sum: lanes, then warps in order ----
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++) tot[m][r] = warp_sum(tot[m][r], KL);
    // red[wk][m][local row], local rows of the second (up) half after those of the first
    if (kp == 0)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                int lr = wr * (RW * RP) + (r % RP) * RW + rl + ((PAIR && r >= RP) ? OUT_ROWS : 0);
                red[(wk * M + m) * ROWS + lr] = tot[m][r];
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

#define GEMV(M, KL, R, WK, NW, U, OCC)                                                                                  \
    extern "C" __global__ void __launch_bounds__(NW * 32, OCC) gemv_m##M##_kl##KL##_r##R##_wk##WK##_nw##NW##_u##U##_o##OCC( \
        const uint4* qw, const u16* sc, const float* gs, const u16* x, const u16* bias, u16* y, int N, int K,           \
        int x_stride, int seg_steps)                                                                                    \
    {                                                                                                                   \
        Gemv p = {qw, sc, gs, x, bias, y, N, K, x_stride, seg_steps};                                                   \
        gemv_body<M, KL, R, WK, NW, U, false>(p, 0, 0);                                                                 \
    }
