// Shared by the attention kernels: matrices in shared memory to and from tensor cores, e4m3 bytes to halves.
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
