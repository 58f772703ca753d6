// Attention over a paged cache, grouped query heads. One new token a sequence (decode): by splits of the context, which a
// second launch adds up in order. Several (prefill): causal, online softmax. Products on tensor cores, softmax and
// sums in float32.
#include "sm70_common.cuh"

DEV void wmma_a(u32 (&f)[8], const u16* p, int ld) {
    asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],%9;"
        : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]), "=r"(f[4]), "=r"(f[5]), "=r"(f[6]), "=r"(f[7])
        : "r"((u32)__cvta_generic_to_shared(p)), "r"(ld) : "memory");
}
DEV void wmma_b_col(u32 (&f)[8], const u16* p, int ld) {
    asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],%9;"
        : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]), "=r"(f[4]), "=r"(f[5]), "=r"(f[6]), "=r"(f[7])
        : "r"((u32)__cvta_generic_to_shared(p)), "r"(ld) : "memory");
}
DEV void wmma_b_row(u32 (&f)[8], const u16* p, int ld) {
    asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],%9;"
        : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]), "=r"(f[4]), "=r"(f[5]), "=r"(f[6]), "=r"(f[7])
        : "r"((u32)__cvta_generic_to_shared(p)), "r"(ld) : "memory");
}
DEV void wmma_mma_row(float (&c)[8], const u32 (&a)[8], const u32 (&b)[8]) {
    asm volatile("wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%0,%1,%2,%3,%4,%5,%6,%7},"
        "{%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19,%20,%21,%22,%23},{%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]),
          "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));
}
DEV void wmma_store_c(float* p, const float (&c)[8], int ld) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0],{%1,%2,%3,%4,%5,%6,%7,%8},%9;"
        :: "r"((u32)__cvta_generic_to_shared(p)), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), "f"(c[4]), "f"(c[5]),
           "f"(c[6]), "f"(c[7]), "r"(ld) : "memory");
}
DEV void wmma_load_c(float (&c)[8], const float* p, int ld) {
    asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],%9;"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]), "=f"(c[4]), "=f"(c[5]), "=f"(c[6]), "=f"(c[7])
        : "r"((u32)__cvta_generic_to_shared(p)), "r"(ld) : "memory");
}
// Two of the four e4m3 bytes of a word -> half2 of value * 2^-8, exact.
DEV u32 e4m3_02(u32 w) { return ((w << 8) & 0x80008000u) | ((w << 7) & 0x3F803F80u); }
DEV u32 e4m3_13(u32 w) { return (w & 0x80008000u) | ((w >> 1) & 0x3F803F80u); }
// All four in order.
DEV uint2 half4(u32 w) {
    u32 even = e4m3_02(w), odd = e4m3_13(w);
    return make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
}

// ---- one new token a sequence (decode) ----
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

// out[seq][head] from the splits, in order; grid (heads, sequences), 128 threads, shared memory splits + 1 + 3 + 512 floats.
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

// ---- several new tokens a sequence (prefill, chunked or not): causal, keys from the paged cache ----
struct Prefill {
    const u16* q;            // [tokens][heads] rows of D halves, strides q_token, q_head
    u16* out;                // alike, o_token, o_head
    const u8* k;
    const u8* v;
    const int* table;
    const int* lengths;      // [B] tokens in the cache, the new ones included
    const int* starts;       // [B + 1] first new token of each sequence in q
    u64 k_block, k_token, k_head, v_block, v_token, v_head;
    int q_token, q_head, o_token, o_head, group, block_size, table_stride, window;
    float scale, v_scale;    // softmax scale * key scale * log2(e); value scale
};
#define PK 32       // keys at a time
#define PSP 36      // pitch of the scores, in floats
#define PPP 40      // pitch of the weights, in halves

// A block: 16 new tokens a warp, one head. blockIdx: tile of tokens (the last first: it has most keys), head, sequence.
template <int D, bool FP8, int NW>
DEV void prefill_body(const Prefill& p)
{
    constexpr int DP = D + 8, CH = FP8 ? D / 16 : D / 8, T = NW * 32, U = PK * CH / T, ROWS = NW * 16;
    extern __shared__ uint4 smem[];
    u16* sq = (u16*)smem;                     // [ROWS][DP]
    u16* sk = sq + ROWS * DP;                 // [PK][DP]
    u16* sv = sk + PK * DP;                   // [PK][DP]
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    float* ss = (float*)(sv + PK * DP) + warp * (16 * PSP + 16 * PPP / 2 + 16);  // [16][PSP]
    u16* sp = (u16*)(ss + 16 * PSP);          // [16][PPP]
    float* sf = (float*)(sp + 16 * PPP);      // [16]
    const int seq = blockIdx.z, head = blockIdx.y, kv = head / p.group;
    const int start = p.starts[seq], news = p.starts[seq + 1] - start, length = p.lengths[seq];
    const int tiles = (news + ROWS - 1) / ROWS, tile = tiles - 1 - (int)blockIdx.x;
    if (tile < 0) return;
    const int row0 = tile * ROWS, position0 = length - news + row0;  // of the block's first token
    const int last = min(length, position0 + ROWS);                  // keys that any of its tokens sees
    const int first = p.window > 0 ? max(0, position0 - p.window + 1) / PK * PK : 0;
    const int* table = p.table + (size_t)seq * p.table_stride;

    for (int i = tid; i < ROWS * (D / 8); i += T) {
        int r = i / (D / 8), c = i % (D / 8);
        const uint4* from = (const uint4*)(p.q + (size_t)(start + row0 + r) * p.q_token + (size_t)head * p.q_head);
        *(uint4*)(sq + r * DP + c * 8) = row0 + r < news ? from[c] : make_uint4(0, 0, 0, 0);
    }
    for (int i = lane; i < 256; i += 32) ss[(i >> 4) * PSP + (i & 15)] = (float)(i >> 4);
    __syncwarp();
    int row[8];
    {
        float c[8];
        wmma_load_c(c, ss, PSP);
#pragma unroll
        for (int e = 0; e < 8; e++) row[e] = (int)c[e];
    }
    float o[D / 16][8], top = -1e30f, sum = 0.f;  // top and sum: token lane / 2 of the warp
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int e = 0; e < 8; e++) o[i][e] = 0.f;

    uint4 rk[U], rv[U];
    auto fetch = [&](int key0) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            int i = u * T + tid, key = min(key0 + i / CH, last - 1);
            u64 block = __ldg(table + key / p.block_size), slot = key % p.block_size;
            rk[u] = __ldg((const uint4*)(p.k + block * p.k_block + slot * p.k_token + kv * p.k_head) + i % CH);
            rv[u] = __ldg((const uint4*)(p.v + block * p.v_block + slot * p.v_token + kv * p.v_head) + i % CH);
        }
    };
    auto put = [&](u16* to_tile, const uint4 (&raw)[U]) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            int i = u * T + tid;
            uint4* to = (uint4*)(to_tile + i / CH * DP) + i % CH * (FP8 ? 2 : 1);
            if (FP8) {
                uint2 a = half4(raw[u].x), b = half4(raw[u].y), c = half4(raw[u].z), d = half4(raw[u].w);
                to[0] = make_uint4(a.x, a.y, b.x, b.y);
                to[1] = make_uint4(c.x, c.y, d.x, d.y);
            } else {
                to[0] = raw[u];
            }
        }
    };
    const int my_last = position0 + warp * 16 + 15;  // the last key that this warp's tokens see
    fetch(first);
    for (int key0 = first; key0 < last; key0 += PK) {
        __syncthreads();
        put(sk, rk);
        put(sv, rv);
        __syncthreads();
        if (key0 + PK < last) fetch(key0 + PK);
        if (key0 > my_last) continue;  // the same for a whole warp
        float s[2][8];
#pragma unroll
        for (int e = 0; e < 8; e++) s[0][e] = s[1][e] = 0.f;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 a[8], b[8];
            wmma_a(a, sq + warp * 16 * DP + i * 16, DP);
            wmma_b_col(b, sk + i * 16, DP);
            wmma_mma(s[0], a, b);
            wmma_b_col(b, sk + 16 * DP + i * 16, DP);
            wmma_mma(s[1], a, b);
        }
        wmma_store_c(ss, s[0], PSP);
        wmma_store_c(ss + 16, s[1], PSP);
        __syncwarp();
        {
            const int r = lane >> 1, k0 = (lane & 1) * 16, position = position0 + warp * 16 + r;
            const int lowest = p.window > 0 ? position - p.window + 1 : 0;
            float w[16], t = top, add = 0.f;
#pragma unroll
            for (int e = 0; e < 16; e++) {
                int key = key0 + k0 + e;
                w[e] = key <= position && key >= lowest && key < last ? ss[r * PSP + k0 + e] * p.scale : -2e30f;
                t = fmaxf(t, w[e]);
            }
            t = fmaxf(t, __shfl_xor_sync(~0u, t, 1));
#pragma unroll
            for (int e = 0; e < 16; e++) {
                w[e] = exp2f(w[e] - t);
                add += w[e];
            }
            uint4* to = (uint4*)(sp + r * PPP + k0);
            to[0] = make_uint4(fh2(w[0], w[1]), fh2(w[2], w[3]), fh2(w[4], w[5]), fh2(w[6], w[7]));
            to[1] = make_uint4(fh2(w[8], w[9]), fh2(w[10], w[11]), fh2(w[12], w[13]), fh2(w[14], w[15]));
            add += __shfl_xor_sync(~0u, add, 1);
            float f = exp2f(top - t);
            sum = sum * f + add;
            top = t;
            if (!(lane & 1)) sf[r] = f;
        }
        __syncwarp();
        float f[8];
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = sf[row[e]];
        u32 a0[8], a1[8];
        wmma_a(a0, sp, PPP);
        wmma_a(a1, sp + 16, PPP);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 b[8];
#pragma unroll
            for (int e = 0; e < 8; e++) o[i][e] *= f[e];
            wmma_b_row(b, sv + i * 16, DP);
            wmma_mma_row(o[i], a0, b);
            wmma_b_row(b, sv + 16 * DP + i * 16, DP);
            wmma_mma_row(o[i], a1, b);
        }
        __syncwarp();
    }
    // The sums leave through the warp's part of the scores, 16 columns at a time.
    if (!(lane & 1)) sf[lane >> 1] = sum > 0.f ? p.v_scale / sum : 0.f;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        wmma_store_c(ss, o[i], PSP);
        __syncwarp();
        int r = lane >> 1, c0 = (lane & 1) * 8, token = row0 + warp * 16 + r;
        const float* v = ss + r * PSP + c0;
        float f = sf[r];
        if (token < news)
            *(uint4*)(p.out + (size_t)(start + token) * p.o_token + (size_t)head * p.o_head + i * 16 + c0) =
                make_uint4(fh2(v[0] * f, v[1] * f), fh2(v[2] * f, v[3] * f), fh2(v[4] * f, v[5] * f), fh2(v[6] * f, v[7] * f));
        __syncwarp();
    }
}
#define PREFILL(D, FP8, NW, OCC)                                                                                        \
    extern "C" __global__ void __launch_bounds__(NW * 32, OCC) prefill_d##D##_f##FP8##_nw##NW##_o##OCC(                  \
        const u16* q, u16* out, const u8* k, const u8* v, const int* table, const int* lengths, const int* starts,      \
        u64 k_block, u64 k_token, u64 k_head, u64 v_block, u64 v_token, u64 v_head, int q_token, int q_head,            \
        int o_token, int o_head, int group, int block_size, int table_stride, int window, float scale, float v_scale)   \
    {                                                                                                                   \
        Prefill p = {q, out, k, v, table, lengths, starts, k_block, k_token, k_head, v_block, v_token, v_head, q_token, \
                     q_head, o_token, o_head, group, block_size, table_stride, window, scale, v_scale};                 \
        prefill_body<D, FP8, NW>(p);                                                                                    \
    }
