// Attention of one new token a sequence over a paged cache, grouped query heads, by splits of the context, which a second
// launch adds up in order. Products on tensor cores, softmax and sums in float32.
#include "sm70_attention.cuh"

struct Decode {
    const u16* q;            // [B][heads] rows of D halves, strides q_seq, q_head (halves)
    u16* out;                // alike, out_seq, out_head
    const u8* k;             // cache, byte strides by block, token, head
    const u8* v;
    const int* table;        // [B][table_stride] block numbers
    const int* lengths;      // [B] tokens to attend to, the new one included
    const u16* new_k;        // null, or the last token's key and value, [B][key heads] rows of D halves, strides new_*:
    const u16* new_v;        // written into the cache first (half only), where
    const u64* slots;        // [B] block * block_size + place in it; negative: nowhere
    float* part;             // [B][heads][splits][D] sums of exp(score - top) * v
    float* stats;            // [B][heads][splits][2] top (base 2), sum of exp
    u32 k_block, k_token, k_head, v_block, v_token, v_head;
    int new_k_seq, new_k_head, new_v_seq, new_v_head;
    int q_seq, q_head, out_seq, out_head, heads, group, block_size;
    u32 block_magic;         // 2^32 / block_size, rounded up: key / block_size is the high half of a product
    int table_stride, window;
    float scale, v_scale;    // softmax scale * key scale * log2(e); value scale
};

// Which keys of a sequence each split has.
struct Splits {
    int length, first, base, per, used;  // keys first .. length - 1; split i of `used` has `per` from base + i * per on
    DEV Splits(int length, int window, int splits, int quantum) : length(length) {
        first = window > 0 ? max(0, length - window) : 0;
        base = first & ~15;
        int span = max(length - base, 1);
        per = ((span + splits - 1) / splits + quantum - 1) / quantum * quantum;
        used = (span + per - 1) / per;
    }
};

// Keys and values go from memory straight into tensor-core fragments (FRAG: sm70_common.cuh), so neither is in shared
// memory and a warp waits for no other. What makes 16-byte loads fit is that the order of d in a score, and of the
// columns of the output, is free: `q_place` and `o_place` say where d lies in them. A chunk is CB bytes of 16 keys.
template <int D, bool FP8>
struct Cache {
    static constexpr int ES = FP8 ? 1 : 2, ROW = D * ES, CB = ROW < 128 ? ROW : 128, CHUNKS = ROW / CB;
    static constexpr int WIDE = CB / ES, STEPS = WIDE / 16;  // elements of a key in a chunk, and tiles of 16 of them
#if FRAG == 70
    static constexpr int REGS = CB / 4, K_ROWS = 1, V_ROWS = 16;
    // Lane: 16 consecutive d of one key; all keys of one column.
    static DEV int k_row(int lane, int) { return frag_b(lane); }
    static DEV int k_at(int, int i) { return i * 16; }
    static DEV int v_row(int, int i) { return i; }
    static DEV int v_at(int lane) { return frag_b(lane) * (CB / 16); }
    static DEV int q_place(int d) { return FP8 ? (d & ~3) | (d & 1) << 1 | (d >> 1 & 1) : d; }
    static DEV int o_place(int d) {
        constexpr int W = WIDE / 16;
        return d / WIDE * WIDE + d % W * 16 + d % WIDE / W;
    }
    static DEV void k_fragment(const u32 (&r)[REGS], int s, u32 (&b)[8]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            b[2 * i] = FP8 ? e4m3_02(r[4 * s + i]) : r[8 * s % REGS + 2 * i];
            b[2 * i + 1] = FP8 ? e4m3_13(r[4 * s + i]) : r[8 * s % REGS + 2 * i + 1];
        }
    }
    static DEV void v_fragment(const u32 (&r)[REGS], int t, u32 (&b)[8]) {
        constexpr int W = REGS / 16;
        const int i = FP8 ? t >> 2 : t >> 1;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            u32 lo = r[2 * m * W + i], hi = r[(2 * m + 1) * W + i];
            u32 x = __byte_perm(lo, hi, (FP8 ? t >> 1 & 1 : t & 1) ? 0x7632 : 0x5410);
            b[m] = !FP8 ? x : t & 1 ? e4m3_13(x) : e4m3_02(x);
        }
    }
#else
    static constexpr int REGS = CB / 8, K_ROWS = 2, V_ROWS = 4;
    // Lane 4g+c: of keys g and g+8 the pieces c of every 64 bytes; of keys 2c, 2c+1, 2c+8, 2c+9 the g-th eighth.
    static DEV int k_row(int lane, int i) { return (lane >> 2) + 8 * i; }
    static DEV int k_at(int lane, int i) { return i * 64 + (lane & 3) * 16; }
    static DEV int v_row(int lane, int i) { return 2 * (lane & 3) + (i & 1) + 8 * (i >> 1); }
    static DEV int v_at(int lane) { return (lane >> 2) * (CB / 8); }
    static DEV int q_place(int d) {
        const int byte = d * ES, word = byte >> 2 & 3, c = byte >> 4 & 3, l = byte >> 6;
        const int step = FP8 ? l * 4 + word : l * 2 + (word >> 1), hi = FP8 ? d & 1 : word & 1, e = FP8 ? d >> 1 & 1 : d & 1;
        return step * 16 + 2 * c + e + 8 * hi;
    }
    static DEV int o_place(int d) {
        constexpr int W = WIDE / 8;
        return d / WIDE * WIDE + (d % W >> 1) * 16 + d % WIDE / W + 8 * (d & 1);
    }
    static DEV void k_fragment(const u32 (&r)[REGS], int s, u32 (&b)[8]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32* w = r + h * (REGS / 2) + (FP8 ? s : 2 * s);
            b[2 * h] = FP8 ? e4m3_02(w[0]) : w[0];
            b[2 * h + 1] = FP8 ? e4m3_13(w[0]) : w[1];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) b[4 + i] = b[i];
    }
    static DEV void v_fragment(const u32 (&r)[REGS], int t, u32 (&b)[8]) {
        constexpr int W = REGS / 4;
        const int i = FP8 ? t >> 1 : t;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 lo = r[2 * h * W + i], hi = r[(2 * h + 1) * W + i];
            u32 x = __byte_perm(lo, hi, FP8 && t & 1 ? 0x7632 : 0x5410);
            b[h] = FP8 ? e4m3_02(x) : x;
            b[2 + h] = FP8 ? e4m3_13(x) : __byte_perm(lo, hi, 0x7632);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) b[4 + i] = b[i];
    }
#endif
};

// Weights of a warp's KEYS keys from their scores, LANES lanes a head: [32 / LANES] heads of ss to sp, and to sf what the
// sums so far are to be multiplied by. Returns whether that is not 1 for some head of the lane.
template <int KEYS, int LANES>
DEV bool softmax(const float* ss, u16* sp, float* sf, int key0, int first, int end, float scale, float& top, float& sum)
{
    constexpr int SP = KEYS + 4, PP = KEYS + 8, N = KEYS / LANES;
    const int lane = threadIdx.x & 31, h = lane / LANES, k0 = lane % LANES * N;
    float w[N], t = top, add = 0.f;
#pragma unroll
    for (int e = 0; e < N; e++) w[e] = ss[h * SP + k0 + e] * scale;
    if (key0 < first || key0 + KEYS > end) {
#pragma unroll
        for (int e = 0; e < N; e++)
            if (key0 + k0 + e < first || key0 + k0 + e >= end) w[e] = -2e30f;
    }
#pragma unroll
    for (int e = 0; e < N; e++) t = fmaxf(t, w[e]);
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) t = fmaxf(t, __shfl_xor_sync(~0u, t, o));
#pragma unroll
    for (int e = 0; e < N; e++) {
        w[e] = exp2f(w[e] - t);
        add += w[e];
    }
#pragma unroll
    for (int e = 0; e < N; e += 2) *(u32*)(sp + h * PP + k0 + e) = fh2(w[e], w[e + 1]);
    add = warp_sum(add, LANES);
    const bool grew = t > top;
    const float f = exp2f(top - t);
    sum = sum * f + add;
    top = t;
    if (lane % LANES == 0) sf[h] = f;
    return grew;
}

// A block: up to 16 query heads of one key head, one split of the context; its NW warps take TT tiles of 16 keys in turn.
// R chunks are in flight a warp. Scores and weights pass between lanes through shared memory by wmma loads and stores, so
// nothing depends on how a device lays out sums; which row an element of a sum belongs to is found by loading a matrix of
// row numbers.
template <int D, bool FP8, int TT, int R, int NW>
DEV void decode_body(const Decode& p)
{
    using C = Cache<D, FP8>;
    constexpr int DP = D + 8, KEYS = 16 * TT, SP = KEYS + 4, PP = KEYS + 8, HALF = TT * C::CHUNKS, NC = 2 * HALF;
    constexpr int WARP_BYTES = 16 * SP * 4 + 16 * PP * 2 + 16 * 4;
    static_assert(NC % R == 0 && TT <= R, "a chunk's registers are known when compiled; those of all tiles are there");
    extern __shared__ uint4 smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    u16* sq = (u16*)smem;                                               // [16][DP] query heads, zeros below
    u8* mine = (u8*)smem + 16 * DP * 2 + warp * WARP_BYTES;
    float* ss = (float*)mine;                                           // [16][SP] scores
    u16* sp = (u16*)(mine + 16 * SP * 4);                               // [16][PP] weights
    float* sf = (float*)(mine + 16 * SP * 4 + 16 * PP * 2);             // [16] factor for what was summed before

    const int split = blockIdx.x, splits = gridDim.x, seq = blockIdx.z, chunks = (p.group + 15) / 16;
    const int kv = blockIdx.y / chunks, head0 = kv * p.group + blockIdx.y % chunks * 16;
    const int heads = min(16, (kv + 1) * p.group - head0);
    // Queries first: they depend on nothing.
    constexpr int QL = (16 * (D / 8) + NW * 32 - 1) / (NW * 32);
    uint4 queries[QL];
#pragma unroll
    for (int i = 0; i < QL; i++) {
        int h = (tid + i * NW * 32) / (D / 8), d = (tid + i * NW * 32) % (D / 8);
        const uint4* from = (const uint4*)(p.q + (size_t)seq * p.q_seq + (size_t)(head0 + h) * p.q_head);
        queries[i] = h < heads ? __ldg(from + d) : make_uint4(0, 0, 0, 0);
    }
    const Splits of(p.lengths[seq], p.window, splits, NW * KEYS);
    if (split >= of.used) return;
    const int length = of.length, first = of.first, used = of.used;
    const int begin = of.base + split * of.per, end = min(length, begin + of.per), last_tile = (end - 1) & ~15;
    const int turns = length > 0 ? max(0, (end - begin - warp * KEYS + NW * KEYS - 1) / (NW * KEYS)) : 0;
    const int* table = p.table + (size_t)seq * p.table_stride;
    const u8 *keys = p.k + (u64)kv * p.k_head, *values = p.v + (u64)kv * p.v_head;
    if (!FP8 && p.new_k && split == used - 1) {
        const u64 at = p.slots[seq], block = at / (u32)p.block_size, slot = at % (u32)p.block_size;
        for (int i = tid; i < D / 4 && !(at >> 63); i += NW * 32) {  // 16 bytes each: of the key, then of the value
            const bool is_k = i < D / 8;
            const u16* from = is_k ? p.new_k + (size_t)seq * p.new_k_seq + (size_t)kv * p.new_k_head
                                   : p.new_v + (size_t)seq * p.new_v_seq + (size_t)kv * p.new_v_head;
            const u8* to = is_k ? keys + block * p.k_block + slot * p.k_token : values + block * p.v_block + slot * p.v_token;
            ((uint4*)to)[i % (D / 8)] = __ldg((const uint4*)from + i % (D / 8));
        }
        __syncthreads();  // this block alone reads them
    }

    struct Place { int block[TT], slot[TT]; };                          // of a turn's tiles
    auto tile_of = [&](int turn, int t) { return min(begin + ((turn * NW + warp) * TT + t) * 16, last_tile); };
    auto look = [&](int turn) {
        Place at;
#pragma unroll
        for (int t = 0; t < TT; t++) {
            int key = tile_of(turn, t), number = __umulhi(key, p.block_magic);
            at.block[t] = __ldg(table + number);
            at.slot[t] = key - number * p.block_size;
        }
        return at;
    };
    u32 raw[R][C::REGS];
    auto fetch = [&](int chunk, int turn, const Place& at) {
        const bool is_k = chunk < HALF;
        const int t = is_k ? chunk % TT : (chunk - HALF) / C::CHUNKS, key0 = tile_of(turn, t);
        const int j = is_k ? chunk / TT : chunk % C::CHUNKS;
        u32(&r)[C::REGS] = raw[chunk % R];
        // What is after the context may be anything, and NaN times a weight of zero is NaN: the last key is read instead.
        auto row = [&](int i) { return (u32)(min(i, end - 1 - key0) + at.slot[t]); };
        if (is_k) {
            const u8* from = keys + (u64)(u32)at.block[t] * p.k_block + j * C::CB;
            constexpr int LOADS = C::REGS / 4 / C::K_ROWS;
#pragma unroll
            for (int i = 0; i < C::K_ROWS; i++) {
                const u8* key = from + (u64)row(C::k_row(lane, i)) * p.k_token;
#pragma unroll
                for (int l = 0; l < LOADS; l++) {
                    uint4 x = ld_once((const uint4*)(key + C::k_at(lane, l)));
                    u32* to = r + (i * LOADS + l) * 4;
                    to[0] = x.x; to[1] = x.y; to[2] = x.z; to[3] = x.w;
                }
            }
        } else {
            const u8* from = values + (u64)(u32)at.block[t] * p.v_block + j * C::CB + C::v_at(lane);
            constexpr int WORDS = C::REGS / C::V_ROWS;
#pragma unroll
            for (int i = 0; i < C::V_ROWS; i++) {
                const u8* value = from + (u64)row(C::v_row(lane, i)) * p.v_token;
                if (WORDS == 4) {
                    uint4 x = ld_once((const uint4*)value);
                    u32* to = r + i * 4;
                    to[0] = x.x; to[1] = x.y; to[2] = x.z; to[3] = x.w;
                } else if (WORDS == 2) {
                    uint2 x = ld_once((const uint2*)value);
                    r[i * 2 % C::REGS] = x.x; r[(i * 2 + 1) % C::REGS] = x.y;
                } else {
                    r[i] = ld_once((const u32*)value);
                }
            }
        }
    };

    // The first keys and values are on their way while the queries are staged.
    Place now = {}, next = {};
    if (turns) {
        now = look(0);
#pragma unroll
        for (int c = 0; c < R; c++) fetch(c, 0, now);
        next = look(1);
    }
#pragma unroll
    for (int i = 0; i < QL; i++) {
        int h = (tid + i * NW * 32) / (D / 8), d = (tid + i * NW * 32) % (D / 8) * 8;
        u32 w[4] = {queries[i].x, queries[i].y, queries[i].z, queries[i].w};
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (h < 16) sq[h * DP + C::q_place(d + e)] = (u16)(w[e / 2] >> 16 * (e & 1));
    }
    for (int i = lane; i < 256; i += 32) ss[(i >> 4) * SP + (i & 15)] = (float)(i >> 4);
    __syncthreads();
    int row[8];
    {
        float c[8];
        wmma_load_c(c, ss, SP);
#pragma unroll
        for (int e = 0; e < 8; e++) row[e] = (int)c[e];
    }
    const int per_head = heads <= 4 ? 8 : heads <= 8 ? 4 : 2;  // lanes that share a head's weights
    float o[D / 16][8], top = -1e30f, sum = 0.f;               // top and sum: head lane / per_head
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int e = 0; e < 8; e++) o[i][e] = 0.f;

    for (int turn = 0; turn < turns; turn++) {
        auto fetch_after = [&](int chunk) {
            if (chunk + R < NC) fetch(chunk + R, turn, now);
            else if (turn + 1 < turns) fetch(chunk + R - NC, turn + 1, next);
        };
        __syncwarp();
        {
            float s[TT][8];
#pragma unroll
            for (int t = 0; t < TT; t++)
#pragma unroll
                for (int e = 0; e < 8; e++) s[t][e] = 0.f;
#pragma unroll
            for (int j = 0; j < C::CHUNKS; j++) {
#pragma unroll
                for (int i = 0; i < C::STEPS; i++) {
                    u32 a[8], b[8];
                    wmma_a(a, sq + (j * C::STEPS + i) * 16, DP);
#pragma unroll
                    for (int t = 0; t < TT; t++) {
                        C::k_fragment(raw[(j * TT + t) % R], i, b);
                        wmma_mma(s[t], a, b);
                    }
                }
#pragma unroll
                for (int t = 0; t < TT; t++) fetch_after(j * TT + t);
            }
#pragma unroll
            for (int t = 0; t < TT; t++) wmma_store_c(ss + t * 16, s[t], SP);
        }
        __syncwarp();
        const int key0 = begin + (turn * NW + warp) * KEYS;
        bool grew;
        if (heads <= 4) grew = softmax<KEYS, 8>(ss, sp, sf, key0, first, end, p.scale, top, sum);
        else if (heads <= 8) grew = softmax<KEYS, 4>(ss, sp, sf, key0, first, end, p.scale, top, sum);
        else grew = softmax<KEYS, 2>(ss, sp, sf, key0, first, end, p.scale, top, sum);
        __syncwarp();
        if (__any_sync(~0u, grew)) {
            float f[8];
#pragma unroll
            for (int e = 0; e < 8; e++) f[e] = sf[row[e]];
#pragma unroll
            for (int i = 0; i < D / 16; i++)
#pragma unroll
                for (int e = 0; e < 8; e++) o[i][e] *= f[e];
        }
#pragma unroll
        for (int t = 0; t < TT; t++) {
            u32 a[8];
            wmma_a(a, sp + t * 16, PP);
#pragma unroll
            for (int j = 0; j < C::CHUNKS; j++) {
                const int chunk = HALF + t * C::CHUNKS + j;
#pragma unroll
                for (int i = 0; i < C::STEPS; i++) {
                    u32 b[8];
                    C::v_fragment(raw[chunk % R], i, b);
                    wmma_mma(o[j * C::STEPS + i], a, b);
                }
                fetch_after(chunk);
            }
        }
        now = next;
        next = look(turn + 2);
    }

    // ---- over the warps, in order, 128 columns at a time ----
    constexpr int COLUMNS = D < 128 ? D : 128;
    float* so = (float*)smem;              // [NW][16][COLUMNS]
    float* st = so + NW * 16 * COLUMNS;    // [NW][16][2]
    const size_t row0 = ((size_t)seq * p.heads + head0) * splits;
    __syncthreads();
    if (lane % per_head == 0) {
        st[(warp * 16 + lane / per_head) * 2] = top;
        st[(warp * 16 + lane / per_head) * 2 + 1] = sum;
    }
#pragma unroll
    for (int c = 0; c < D; c += COLUMNS) {
        if (c) __syncthreads();
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; i++) wmma_store_c(so + warp * 16 * COLUMNS + i * 16, o[c / 16 + i], COLUMNS);
        __syncthreads();
        for (int i = tid; i < heads * COLUMNS; i += NW * 32) {
            int h = i / COLUMNS, d = c + i % COLUMNS;
            float t = -1e30f, v = 0.f, s = 0.f;
#pragma unroll
            for (int w = 0; w < NW; w++) t = fmaxf(t, st[(w * 16 + h) * 2]);
#pragma unroll
            for (int w = 0; w < NW; w++) {
                float f = exp2f(st[(w * 16 + h) * 2] - t);
                v += so[(w * 16 + h) * COLUMNS + C::o_place(d) - c] * f;
                s += st[(w * 16 + h) * 2 + 1] * f;
            }
            if (used == 1) {
                p.out[(size_t)seq * p.out_seq + (size_t)(head0 + h) * p.out_head + d] = fh(s > 0.f ? v * (p.v_scale / s) : 0.f);
                continue;
            }
            const size_t to = row0 + (size_t)h * splits + split;
            p.part[to * D + d] = v;
            if (d == 0) *(float2*)(p.stats + to * 2) = make_float2(t, s);
        }
    }
}

// out[seq][head] from the splits, in order; grid (heads, sequences), 128 threads, shared memory 512 + 129 floats.
// The threads share the splits by parts: D / 4 of them take a part.
template <int D>
DEV void combine(const float* part, const float* stats, const Splits& of, u16* out, float v_scale)
{
    constexpr int Q = D / 4, PARTS = 128 / Q, EARLY = 8;
    extern __shared__ uint4 smem[];
    float4* sums = (float4*)smem;              // [PARTS][Q]
    float* factor = (float*)smem + 512;        // [used + 1]
    const int tid = threadIdx.x, lane = tid & 31, mine = (of.used + PARTS - 1) / PARTS;
    const int from = tid / Q * mine, to = min(of.used, from + mine);
    const float4* p = (const float4*)part + tid % Q;
    float4 early[EARLY];  // on their way while the factors are made
#pragma unroll
    for (int j = 0; j < EARLY; j++) early[j] = from + j < to ? __ldg(p + (from + j) * Q) : make_float4(0.f, 0.f, 0.f, 0.f);
    if (tid < 32) {
        float2 a[4];  // splits are at most 128
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = lane + 32 * i < of.used ? __ldg((const float2*)stats + lane + 32 * i) : make_float2(-1e30f, 0.f);
        float t = fmaxf(fmaxf(a[0].x, a[1].x), fmaxf(a[2].x, a[3].x)), s = 0.f;
        for (int i = 16; i; i >>= 1) t = fmaxf(t, __shfl_xor_sync(~0u, t, i));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float f = exp2f(a[i].x - t);
            if (lane + 32 * i < of.used) factor[lane + 32 * i] = f;
            s += a[i].y * f;
        }
        s = warp_sum(s, 32);
        if (lane == 0) factor[of.used] = s > 0.f ? v_scale / s : 0.f;
    }
    __syncthreads();
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    auto add = [&](float4 x, float f) { v.x += x.x * f; v.y += x.y * f; v.z += x.z * f; v.w += x.w * f; };
#pragma unroll
    for (int j = 0; j < EARLY; j++)
        if (from + j < to) add(early[j], factor[from + j]);
#pragma unroll 8
    for (int j = from + EARLY; j < to; j++) add(__ldg(p + j * Q), factor[j]);
    sums[tid] = v;
    __syncthreads();
    if (tid >= Q) return;
#pragma unroll
    for (int i = 1; i < PARTS; i++) add(sums[i * Q + tid], 1.f);
    const float f = factor[of.used];
    u16* to_out = out + tid * 4;
    to_out[0] = fh(v.x * f); to_out[1] = fh(v.y * f); to_out[2] = fh(v.z * f); to_out[3] = fh(v.w * f);
}
#define COMBINE(D)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(128) decode_combine_d##D(const float* part, const float* stats,         \
        const int* lengths, u16* out, int splits, int quantum, int window, int out_seq, int out_head, float v_scale)    \
    {                                                                                                                   \
        const Splits of(lengths[blockIdx.y], window, splits, quantum);                                                  \
        const size_t row = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * splits;                                      \
        if (of.used > 1)                                                                                                \
            combine<D>(part + row * D, stats + row * 2, of,                                                             \
                       out + (size_t)blockIdx.y * out_seq + (size_t)blockIdx.x * out_head, v_scale);                    \
    }
COMBINE(64)
COMBINE(128)
COMBINE(256)

#define DECODE(D, FP8, TT, R, NW, OCC)                                                                                  \
    extern "C" __global__ void __launch_bounds__(NW * 32, OCC) decode_d##D##_f##FP8##_t##TT##_r##R##_nw##NW##_o##OCC(    \
        const u16* q, u16* out, const u8* k, const u8* v, const int* table, const int* lengths, const u16* new_k,       \
        const u16* new_v, const u64* slots, float* part, float* stats, u32 k_block, u32 k_token, u32 k_head,            \
        u32 v_block, u32 v_token, u32 v_head, int new_k_seq, int new_k_head, int new_v_seq, int new_v_head, int q_seq, int q_head, int out_seq,   \
        int out_head, int heads, int group, int block_size, u32 block_magic, int table_stride, int window,              \
        float scale, float v_scale)                                                                                     \
    {                                                                                                                   \
        Decode p = {q, out, k, v, table, lengths, new_k, new_v, slots, part, stats, k_block, k_token, k_head, v_block,  \
                    v_token, v_head, new_k_seq, new_k_head, new_v_seq, new_v_head, q_seq, q_head, out_seq, out_head,    \
                    heads, group, block_size, block_magic, table_stride, window, scale, v_scale};                       \
        decode_body<D, FP8, TT, R, NW>(p);                                                                              \
    }
