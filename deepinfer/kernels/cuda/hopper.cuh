// The machine instructions of Hopper (sm_90a) that the kernels are written in, one a function.
#pragma once
#include <stdint.h>
#define DEV __device__ __forceinline__

// -- arithmetic on bits and halves ----------------------------------------------------------------------------------

DEV uint32_t and_or(uint32_t x, uint32_t mask, uint32_t y) {  // x & mask | y
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(x), "r"(mask), "r"(y));
  return r;
}
DEV uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t choice) {  // four of eight bytes, a nibble of `choice` each
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(choice));
  return r;
}
DEV uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV uint32_t infinite_to_nan(uint32_t halves) {  // x * 0 + x
  uint32_t r;
  asm("{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.f16x2 %0, %1, zero, %1; }" : "=r"(r) : "r"(halves));
  return r;
}
DEV uint32_t to_halves(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEV uint32_t to_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEV float exp2_fast(float x) {  // relative error 2^-22, 2^-inf = 0
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEV float as_float(uint32_t x) { return __uint_as_float(x); }
DEV uint32_t as_bits(float x) { return __float_as_uint(x); }
// A value that the compiler knows nothing about: what is computed from it is computed here, and not kept in registers
// (or spilled) from the kernel's start on.
DEV uint32_t fresh(uint32_t x) {
  uint32_t r;
  asm volatile("mov.b32 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// -- shared memory, by 32-bit addresses -----------------------------------------------------------------------------

DEV uint32_t shared_address(const void* p) {
  uint32_t r;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(r) : "l"(p));
  return r;
}
DEV void store128(uint32_t at, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEV void store128(uint32_t at, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
DEV void store32(uint32_t at, uint32_t x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEV void store16(uint32_t at, uint32_t x) { asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"((uint16_t)x) : "memory"); }
DEV void load128(uint32_t at, uint32_t (&w)[4]) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
}
DEV uint32_t load32(uint32_t at) {
  uint32_t r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(at) : "memory");
  return r;
}
DEV uint32_t load16(uint32_t at) {
  uint16_t r;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(r) : "r"(at) : "memory");
  return r;
}
DEV uint32_t load8(uint32_t at) {
  uint32_t r;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(at) : "memory");
  return r;
}

// -- global memory --------------------------------------------------------------------------------------------------

// Not by the read-only path (`.nc`): the kernel before may still write, up to `wait_for_kernel_before`.
DEV void read128(const uint8_t* p, uint32_t (&w)[4]) {  // read once: kept out of the first-level cache
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
}
DEV void fetch_to_l2(const uint8_t* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }  // its 128 bytes
DEV int read_index(const int* p) {
  int r;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
}
DEV void write128(uint8_t* p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// 16 bytes of global memory to shared memory, later; nothing where row < 0.
DEV void copy_unless_empty(uint32_t to, const uint8_t* from, int row) {
  asm volatile("{ .reg .pred p; setp.ge.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(to), "l"(from), "r"(row) : "memory");
}

// -- meeting points -------------------------------------------------------------------------------------------------

DEV void barrier_init(uint32_t at, int arrivals) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory"); }
DEV void arrive(uint32_t at) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory"); }
DEV void arrive_when_copied(uint32_t at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory"); }
DEV void wait(uint32_t at, uint32_t parity) {  // for the end of a phase of this parity; the phase before the first one has ended
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done: }\n" ::"r"(at), "r"(parity) : "memory");
}
template <int ID> DEV void four_warps_meet() { asm volatile("bar.sync %0, 128;" ::"n"(ID) : "memory"); }
// What this thread wrote to shared memory is seen by the tensor cores' reads behind the next meeting point.
DEV void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// -- blocks of a cluster --------------------------------------------------------------------------------------------

DEV void cluster_meets() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEV uint32_t in_block(uint32_t at, int rank) {  // the same place of another block's shared memory
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
  return r;
}
DEV float remote(uint32_t at) {
  float r;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(at) : "memory");
  return r;
}
DEV void remote128(uint32_t at, float (&x)[4]) {
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at) : "memory");
}

// -- the kernels before and behind ----------------------------------------------------------------------------------

// A kernel may be launched while the one before it still ends; from here on its results are there.
DEV void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
