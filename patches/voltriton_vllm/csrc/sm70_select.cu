// The largest of a row: experts of a token, key blocks of a query.
#include "sm70_common.cuh"

// NV values a lane, value i of a lane is expert i * 32 + lane. Each lane knows the best of what it has left, so only the
// lane that gave the last one looks again.
template <int NV>
DEV void topk_softmax_body(
    float* weights, int* ids, int* source, const void* logits, int token, int tokens, int E, int topk, int renormalise,
    int is_half)
{
    const int lane = threadIdx.x & 31;
    float v[NV], top = -__int_as_float(0x7f800000);
#pragma unroll
    for (int i = 0; i < NV; i++) {
        int e = i * 32 + lane;
        size_t at = (size_t)token * E + e;
        v[i] = e < E ? (is_half ? hf(((const u16*)logits)[at]) : ((const float*)logits)[at]) : -__int_as_float(0x7f800000);
        top = fmaxf(top, v[i]);
    }
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float sum = 0.f, chosen = 0.f, mine = 0.f, best;
    int place = 0, my_place = 0;
#pragma unroll
    for (int i = 0; i < NV; i++) {
        v[i] = i * 32 + lane < E ? fmaxf(__expf(v[i] - top), 0.f) : -1.f;  // fmaxf drops a NaN
        sum += fmaxf(v[i], 0.f);
    }
    sum = warp_sum(sum, 32);
    auto look = [&] {
        best = v[0];
        place = 0;
#pragma unroll
        for (int i = 1; i < NV; i++)
            if (v[i] > best) { best = v[i]; place = i; }
    };
    look();
    for (int t = 0; t < topk; t++) {
        float most = best;
        for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        u32 have = __ballot_sync(~0u, best == most);
        int arg = place * 32 + lane, winner = __shfl_sync(~0u, arg, __ffs(have) - 1);
        if (have & (have - 1)) {  // several lanes have it: the lowest number
            winner = best == most ? arg : 1024;
            for (int o = 16; o; o >>= 1) winner = min(winner, __shfl_xor_sync(~0u, winner, o));
        }
        chosen += most;
        if (lane == t) {
            mine = most;
            my_place = winner;
        }
        if ((winner & 31) == lane) {
#pragma unroll
            for (int i = 0; i < NV; i++)
                if (i == winner >> 5) v[i] = -1.f;
            look();
        }
    }
    if (lane >= topk) return;
    size_t at = (size_t)token * topk + lane;
    weights[at] = renormalise ? mine / sum * (sum / fmaxf(chosen, 1e-30f)) : mine / sum;
    ids[at] = my_place;
    if (source) source[at] = lane * tokens + token;
}

// Softmax over E experts and the topk largest, ties to the lower number; a warp is a token; E <= 1024, topk <= 32.
// A row of NaN (rows that only pad a CUDA graph hold anything) gets experts 0, 1, ... and NaN weights, never a number
// beyond E.
extern "C" __global__ void __launch_bounds__(128) topk_softmax(
    float* weights, int* ids, int* source, const void* logits, int tokens, int E, int topk, int renormalise, int is_half)
{
    int token = blockIdx.x * 4 + (threadIdx.x >> 5);
    if (token >= tokens) return;
    if (E <= 128) topk_softmax_body<4>(weights, ids, source, logits, token, tokens, E, topk, renormalise, is_half);
    else if (E <= 512) topk_softmax_body<16>(weights, ids, source, logits, token, tokens, E, topk, renormalise, is_half);
    else topk_softmax_body<32>(weights, ids, source, logits, token, tokens, E, topk, renormalise, is_half);
}

DEV u32 ordered(float f) {  // larger floats are larger numbers, both zeros are one; a NaN is beyond infinity
    u32 b = __float_as_uint(f);
    return b > 0x80000000u ? ~b : b | 0x80000000u;
}
// Sum of v over the threads before this one in a block of 1024; `all`: over all of them. Scratch of 32.
DEV int block_before(int v, int* scratch, int& all) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int s = v;
    for (int o = 1; o < 32; o <<= 1) {
        int a = __shfl_up_sync(~0u, s, o);
        if (lane >= o) s += a;
    }
    __syncthreads();  // what was read of scratch before
    if (lane == 31) scratch[warp] = s;
    __syncthreads();
    int before = 0;
    all = 0;
    for (int w = 0; w < 32; w++) {
        if (w == warp) before = all;
        all += scratch[w];
    }
    return before + s - v;
}

// Of each row of x [rows][stride] the places of the k largest among its first min(lengths[row], columns), ascending; all
// of them and -1 behind if there are no more than k. Of equal ones the first. A block of 1024 is a row.
// Radix selection: three passes fix 11, 11 and 10 bits of the k-th largest, two more count and write.
extern "C" __global__ void __launch_bounds__(1024) topk_rows(
    const float* x, const int* lengths, int* places, int columns, int stride, int k)
{
    __shared__ int bins[2048], scratch[32], digit, left;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int n = min(lengths[blockIdx.x], columns);
    x += (size_t)blockIdx.x * stride;
    places += (size_t)blockIdx.x * k;
    if (n <= k) {
        for (int i = tid; i < k; i += 1024) places[i] = i < n ? i : -1;
        return;
    }
    u32 prefix = 0, known = 0;
    int need = k, all;
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
        const u32 width = shift ? 2047u : 1023u;
        bins[tid] = bins[tid + 1024] = 0;
        __syncthreads();
        for (int i = tid; i < n; i += 1024) {
            u32 u = ordered(x[i]);
            if ((u & known) == prefix) atomicAdd(bins + ((u >> shift) & width), 1);
        }
        __syncthreads();
        const int high = 2047 - 2 * tid, a = bins[high], b = bins[high - 1];
        const int above = block_before(a + b, scratch, all);
        if (above < need && above + a + b >= need) {  // one thread
            bool first = above + a >= need;
            digit = first ? high : high - 1;
            left = need - above - (first ? 0 : a);
        }
        __syncthreads();
        prefix |= (u32)digit << shift;
        known |= width << shift;
        need = left;
        __syncthreads();  // before the next pass writes them
    }
    // Warp w has the w-th part of the row. All above `prefix` are taken, of those equal to it the first `need`.
    const int part = (n + 1023) / 1024 * 32, from = warp * part, to = min(n, from + part);
    int above = 0, equal = 0;
    for (int i = from + lane; i - lane < to; i += 32) {
        u32 u = i < to ? ordered(x[i]) : 0u;
        above += __popc(__ballot_sync(~0u, i < to && u > prefix));
        equal += __popc(__ballot_sync(~0u, i < to && u == prefix));
    }
    above = block_before(lane ? 0 : above, scratch, all);
    equal = block_before(lane ? 0 : equal, scratch, all);
    above = __shfl_sync(~0u, above, 0);
    equal = __shfl_sync(~0u, equal, 0);
    for (int i = from + lane; i - lane < to; i += 32) {
        u32 u = i < to ? ordered(x[i]) : 0u;
        u32 greater = __ballot_sync(~0u, i < to && u > prefix), same = __ballot_sync(~0u, i < to && u == prefix);
        u32 lower = (1u << lane) - 1;
        int equal_here = equal + __popc(same & lower);
        if (i < to && (u > prefix || (u == prefix && equal_here < need)))
            places[above + __popc(greater & lower) + min(equal_here, need)] = i;
        above += __popc(greater);
        equal += __popc(same);
    }
}
