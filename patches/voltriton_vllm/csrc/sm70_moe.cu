// NVFP4 experts for few tokens: one launch for gate and up with SiLU, one for down with the weighted sum over experts.
#include "sm70_gemv.cu"

DEV int local_expert(const int* ids, const int* expert_map, int pair) {
    int e = ids[pair];
    return expert_map && e >= 0 ? expert_map[e] : e;
}

// act[pair][i] = silu(gate_i) * up_i of the pair's expert; blockIdx.y is the pair, its token is pair / topk.
#define MOE_UP(KL, R, WK, NW, D, OCC)                                                                                   \
    extern "C" __global__ void __launch_bounds__(NW * 32, OCC) moe_up_kl##KL##_r##R##_wk##WK##_nw##NW##_d##D##_o##OCC(   \
        const uint4* qw, const u16* sc, const float* gs, const u16* x, u16* act, const int* ids, const int* expert_map, \
        int topk, int N, int K, int x_stride, int seg_steps)                                                            \
    {                                                                                                                   \
        int e = local_expert(ids, expert_map, blockIdx.y);                                                              \
        if (e < 0) return;                                                                                              \
        size_t first = (size_t)e * 2 * N;                                                                               \
        int units = (K + 31) >> 5;                                                                                      \
        Gemv p = {qw + first * units, sc + first * units, gs + first, x, nullptr, act, N, K, x_stride, seg_steps};       \
        gemv_body<1, KL, R, WK, NW, D, true>(p, blockIdx.y / topk, blockIdx.y);                                         \
    }

// y[token][n] = sum over t of weight[token][t] * (w2[expert t] @ act[pair t])[n], in the order of t.
// A warp takes whole pairs (warp, warp + warps, ...); its slice of shared memory holds the pair's activations.
template <int KL, int R, int D>
DEV void moe_down(const uint4* qw, const u16* sc, const float* gs, const u16* act, const int* ids, const int* expert_map,
                  const float* weights, u16* y, int topk, int N, int K)
{
    constexpr int RW = 32 / KL, ROWS = RW * R;
    extern __shared__ uint4 smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, warps = blockDim.x >> 5;
    const int kp = lane & (KL - 1), rl = lane / KL, token = blockIdx.y;
    const int units = (K + 31) >> 5, steps = (units + KL - 1) / KL;
    uint4* xs = smem + warp * steps * KL * 4;
    float* xf = (float*)(smem + warps * steps * KL * 4) + warp * steps * KL * 2;
    float* red = (float*)(smem + warps * steps * KL * 4) + warps * steps * KL * 2;  // [topk][ROWS]
    int row[R];
#pragma unroll
    for (int r = 0; r < R; r++) row[r] = min((int)blockIdx.x * ROWS + r * RW + rl, N - 1);

    for (int t = warp; t < topk; t += warps) {
        const int pair = token * topk + t, e = local_expert(ids, expert_map, pair);
        float acc[1][R];
#pragma unroll
        for (int r = 0; r < R; r++) acc[0][r] = 0.f;
        if (e >= 0) {
            const uint4* wp[R];
            const u16* sp[R];
#pragma unroll
            for (int r = 0; r < R; r++) {
                wp[r] = qw + ((size_t)e * N + row[r]) * units + kp;
                sp[r] = sc + ((size_t)e * N + row[r]) * units + kp;
            }
            uint4 q[D][R];
            u16 s[D][R];
            int left = units - kp;
            auto load = [&](int ahead, uint4 (&a)[R], u16 (&b)[R]) {
#pragma unroll
                for (int r = 0; r < R; r++) {
                    a[r] = left > ahead ? ld_stream(wp[r] + ahead) : make_uint4(0, 0, 0, 0);
                    b[r] = left > ahead ? __ldg(sp[r] + ahead) : (u16)0;
                }
            };
#pragma unroll
            for (int d = 0; d < D; d++) load(d * KL, q[d], s[d]);
            float g[R];
#pragma unroll
            for (int r = 0; r < R; r++) g[r] = __ldg(gs + (size_t)e * N + row[r]) * weights[pair];
            stage_x<KL>(xs, xf, act + (size_t)pair * K, 0, steps * KL, K, lane, 32);
            __syncwarp();
            const uint4* xp = xs + kp;
            const float2* fp = (const float2*)xf + kp;
            for (int step = 0; step < steps; step += D) {
#pragma unroll
                for (int d = 0; d < D; d++) {
                    if (d == 0 || step + d < steps)
                        unit_fma<1, KL, R>(acc, q[d], s[d], xp + d * 4 * KL, 0, fp + d * KL, 0);
                    load((d + D) * KL, q[d], s[d]);
                }
                xp += D * 4 * KL;
                fp += D * KL;
                left -= D * KL;
#pragma unroll
                for (int r = 0; r < R; r++) { wp[r] += D * KL; sp[r] += D * KL; }
            }
#pragma unroll
            for (int r = 0; r < R; r++) acc[0][r] = warp_sum(acc[0][r], KL) * g[r];
            __syncwarp();  // the next pair overwrites xs
        }
        if (kp == 0)
#pragma unroll
            for (int r = 0; r < R; r++) red[t * ROWS + r * RW + rl] = acc[0][r];
    }
    __syncthreads();
    for (int i = tid; i < ROWS; i += blockDim.x) {
        int n = blockIdx.x * ROWS + i;
        float v = 0.f;
        for (int t = 0; t < topk; t++) v += red[t * ROWS + i];
        if (n < N) y[(size_t)token * N + n] = fh(v);
    }
}

#define MOE_DOWN(KL, R, D, OCC)                                                                                         \
    extern "C" __global__ void __launch_bounds__(512, OCC) moe_down_kl##KL##_r##R##_d##D##_o##OCC(                      \
        const uint4* qw, const u16* sc, const float* gs, const u16* act, const int* ids, const int* expert_map,         \
        const float* weights, u16* y, int topk, int N, int K)                                                           \
    {                                                                                                                   \
        moe_down<KL, R, D>(qw, sc, gs, act, ids, expert_map, weights, y, topk, N, K);                                   \
    }
