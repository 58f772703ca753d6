// Shared by the sm_70 kernels. No CUDA headers: NVRTC gets this text alone.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEV __device__ __forceinline__

// ---- half precision by PTX -------------------------------------------------------------------
DEV u32 hfma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
DEV u32 hmul2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEV float2 h2f(u32 a) { float2 f; asm("{.reg .b16 l,h; mov.b32 {l,h},%2; cvt.f32.f16 %0,l; cvt.f32.f16 %1,h;}" : "=f"(f.x), "=f"(f.y) : "r"(a)); return f; }
DEV float hf(u16 a) { float f; asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(a)); return f; }
DEV u16 fh(float x) { u16 r; asm("cvt.rn.f16.f32 %0,%1;" : "=h"(r) : "f"(x)); return r; }
DEV u32 fh2(float lo, float hi) { return (u32)fh(lo) | ((u32)fh(hi) << 16); }

// ---- loads -----------------------------------------------------------------------------------
// Weights are read once a step: not kept in L1.
DEV uint4 ld_stream(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
// The same of what this launch may have written.
DEV uint4 ld_once(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEV uint2 ld_once(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
DEV u32 ld_once(const u32* p) {
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// ---- tensor cores: wmma m16n16k16, HMMA.884 on sm_70 and the device's own tensor instruction on newer GPUs ----
// FRAG says which lane holds which element of a fragment; the programming guide leaves that open, so it was read from
// the code that ptxas makes of wmma.load, and fragment_check (sm70_gemm.cu) compares it with wmma.load on the device before
// the kernels are used.
//   FRAG 70 (sm_70): a lane holds 16 consecutive k of one row, every row is held by two lanes.
//   FRAG 80 (sm_80 and later): lane 4g+c holds rows g and g+8, of 16 k those at 2c, 2c+1, 2c+8, 2c+9.
#ifndef FRAG
#define FRAG 70
#endif
#if FRAG == 70
DEV int frag_a(int lane) { return (lane & 3) + 4 * (lane >> 4) + 8 * ((lane >> 2) & 1); }
DEV int frag_b(int lane) { return (lane & 3) + 4 * (lane >> 4) + 8 * ((lane >> 3) & 1); }
#endif
DEV void wmma_mma(float (&c)[8], const u32 (&a)[8], const u32 (&b)[8]) {
    asm volatile("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0,%1,%2,%3,%4,%5,%6,%7},"
        "{%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19,%20,%21,%22,%23},{%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]),
          "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));
}

// ---- NVFP4 -----------------------------------------------------------------------------------
// A packed word holds 8 consecutive weights: element 2j in the low half, 2j+1 in the high half, sign and
// 3 magnitude bits of pair j at bits  j=0: 15, 11..9   j=1: 7, 3..1   j=2: 8, 14..12   j=3: 0, 6..4
// (layout.py makes it). A pair becomes half2 of value * 2^-14: the e2m1 bits are the low exponent bits and the
// top mantissa bit of a half, so 0.5 is a half subnormal and every value is exact. Pairs 2 and 3 are moved to where 0 and 1
// lie together, by two shifts and one bit-wise choice: nine instructions a word.
DEV u32 choose(u32 mask, u32 a, u32 b) {  // bits of a where mask has ones, else of b; in C the compiler makes two of it
    u32 d;
    asm("lop3.b32 %0,%1,%2,%3,0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}
DEV void decode8(u32 q, u32* w) {
    const u32 moved = choose(0x0E0E0E0Eu, q >> 3, q << 7);
    w[0] = q & 0x8E008E00u;
    w[1] = (q << 8) & 0x8E008E00u;
    w[2] = moved & 0x8E008E00u;
    w[3] = (moved << 8) & 0x8E008E00u;
}
#define W_EXP 14
// Two e4m3 scales (bytes, never negative: layout.py folds signs into the weights) -> half2 of scale * 2^-8, exact.
DEV u32 scales2(u32 s) { return __byte_perm(s, 0, 0x4140) << 7; }
#define S_EXP 8
DEV float exp2i(int e) { return __int_as_float((127 + e) << 23); }

DEV float warp_sum(float v, int width) {
    for (int o = width >> 1; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
DEV u32 habs_add2(u32 a, u32 b) {  // |a| + |b|
    u32 d;
    asm("{.reg .b32 x,y; abs.f16x2 x,%1; abs.f16x2 y,%2; add.f16x2 %0,x,y;}" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// Sixteen activations are multiplied by 2^e so that the sum of their magnitudes lies in [2^8, 2^9) (less where they are
// under 2^-7: e is at most 15). With weights at 2^-14 no sum of their products can overflow a half, and what falls
// below the half range is under 2^-14 of the largest term. What undoes it, and the factors of the decoding, goes with
// the scale: *back = 2^(14 + 8 - e).
DEV void scale_group(uint4& v0, uint4& v1, float* back) {
    u32 s = habs_add2(habs_add2(habs_add2(v0.x, v0.y), habs_add2(v0.z, v0.w)), habs_add2(habs_add2(v1.x, v1.y), habs_add2(v1.z, v1.w)));
    s = habs_add2(s, s >> 16);  // a sum over the half range has exponent 31 like infinity, which is enough
    int e = min(23 - (int)((s >> 10) & 31), 15);
    u32 f = (u32)(15 + e) << 10;
    f |= f << 16;
    v0 = make_uint4(hmul2(v0.x, f), hmul2(v0.y, f), hmul2(v0.z, f), hmul2(v0.w, f));
    v1 = make_uint4(hmul2(v1.x, f), hmul2(v1.y, f), hmul2(v1.z, f), hmul2(v1.w, f));
    *back = exp2i(W_EXP + S_EXP - e);
}
