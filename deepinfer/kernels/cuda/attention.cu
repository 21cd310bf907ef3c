#include <stdint.h>
#define DEV __device__ __forceinline__
constexpr int D = 512, H = 64, B = 64;
constexpr int PANEL = 8192;
constexpr int SM_Q = 0, SM_K = 65536, SM_P = 196608, SM_RAW = 212992, SM_MISC = 231424;
constexpr int OFF_ALPHA = 0, OFF_FIN = 256, OFF_MASK = 768, OFF_FLAG = 800, OFF_BAR = 832;
constexpr int BAR_FULL = 0, BAR_EMPTY = 16, BAR_P = 32, BAR_QFULL = 48, BAR_QFREE = 56, BAR_FIN = 64, BAR_RAW = 72, BAR_RAWFREE = 80;
constexpr int SMEM = SM_MISC + OFF_BAR + 88;
static_assert(SMEM <= 232448, "shared memory");

#ifndef NK
#define NK 32
#endif
#ifndef NV
#define NV 4
#endif
#ifndef FETCH
#define FETCH 1
#endif
#ifdef NO_MATH
#define WORD4(at, w, s) sts128(at, w, w, w, s)
#else
#define WORD4 word4
#endif
#ifdef NO_EXP
#define EX(x) (x)
#else
#define EX(x) ex2(x)
#endif
#ifdef CPASYNC
#define RAWWAIT() { asm volatile("cp.async.wait_all;" ::: "memory"); __syncwarp(); }
#else
#define RAWWAIT() { wait(raw, units & 1); units++; }
#endif
#ifdef USE_CONSUME
#define CONSUME(w, sc) { _Pragma("unroll") for (int it = 0; it < 4; it++) asm volatile("" : "+r"(w[it][0]), "+r"(w[it][1]), "+r"(w[it][2]), "+r"(w[it][3]), "+r"(sc[it])); uint32_t x = 0; _Pragma("unroll") for (int it = 0; it < 4; it++) x ^= w[it][0] ^ w[it][1] ^ w[it][2] ^ w[it][3] ^ sc[it]; asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x12345678; @p nanosleep.u32 1; }" :: "r"(x)); }
#else
#define CONSUME(w, sc)
#endif
#define ARRIVED(w, sc) { uint32_t x = 0; _Pragma("unroll") for (int it = 0; it < 4; it++) x ^= w[it][0] ^ w[it][1] ^ w[it][2] ^ w[it][3] ^ sc[it]; asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x12345678; @p nanosleep.u32 1; }" :: "r"(x)); }
#ifdef USE_CFENCE
#define CFENCE() fence_async()
#else
#define CFENCE()
#endif
#ifdef NO_PFENCE
#define PFENCE()
#else
#define PFENCE() fence_async()
#endif
struct Params {
  const uint8_t* q; const uint8_t* wpool; const int* widx; const uint8_t* kpool; const int* kidx; const float* sink; uint8_t* out;
  int64_t wstride, kstride;
  int rows, W, K, wstep, kstep, parts;
  float scale2;
#ifdef TRACE
  uint32_t* trace;
#endif
};

DEV uint32_t lop_or(uint32_t t, uint32_t m, uint32_t a) { uint32_t r; asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(t), "r"(m), "r"(a)); return r; }
DEV uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) { uint32_t r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s)); return r; }
DEV uint32_t hmul2(uint32_t a, uint32_t b) { uint32_t r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEV float ex2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV uint32_t f16x2(float lo, float hi) { uint32_t r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DEV uint32_t bf16x2(float lo, float hi) { uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DEV uint32_t hide(uint32_t x) { uint32_t r; asm volatile("mov.b32 %0, %1;" : "=r"(r) : "r"(x)); return r; }
DEV uint32_t seen(uint32_t x) { uint32_t r; asm("{ .reg .b32 z; mov.b32 z, 0; fma.rn.f16x2 %0, %1, z, %1; }" : "=r"(r) : "r"(x)); return r; }  // infinite: NaN, so that nobody takes it for a logit
DEV float bits(uint32_t x) { return __uint_as_float(x); }
DEV void sts128(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" :: "r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory"); }
DEV void sts32(uint32_t a, uint32_t x) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(a), "r"(x) : "memory"); }
DEV void sts16(uint32_t a, uint32_t x) { asm volatile("st.shared.b16 [%0], %1;" :: "r"(a), "h"((uint16_t)x) : "memory"); }
DEV void sts8(uint32_t a, uint32_t x) { asm volatile("st.shared.b8 [%0], %1;" :: "r"(a), "r"(x) : "memory"); }
DEV uint32_t lds32(uint32_t a) { uint32_t r; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(a) : "memory"); return r; }
DEV uint32_t lds16(uint32_t a) { uint16_t r; asm volatile("ld.shared.b16 %0, [%1];" : "=h"(r) : "r"(a) : "memory"); return r; }
DEV uint32_t lds8(uint32_t a) { uint32_t r; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(a) : "memory"); return r; }
DEV void lds128(uint32_t a, uint32_t (&w)[4]) { asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(a) : "memory"); }
DEV void ldg128(const uint8_t* p, uint32_t (&w)[4]) { asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p)); }
DEV void ldg128_if(const uint8_t* p, uint32_t (&w)[4], int index) { asm volatile("{ .reg .pred p; setp.ge.s32 p, %5, 0; @p ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4]; }" : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3]) : "l"(p), "r"(index)); }
DEV void ldg16_if(const uint8_t* p, uint32_t& w, int index) { asm volatile("{ .reg .pred p; setp.ge.s32 p, %2, 0; @p ld.global.nc.u16 %0, [%1]; }" : "+r"(w) : "l"(p), "r"(index)); }
DEV void ldg8_if(const uint8_t* p, uint32_t& w, int index) { asm volatile("{ .reg .pred p; setp.ge.s32 p, %2, 0; @p ld.global.nc.u8 %0, [%1]; }" : "+r"(w) : "l"(p), "r"(index)); }
DEV void copy_if(uint32_t to, const uint8_t* p, int index) { asm volatile("{ .reg .pred p; setp.ge.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" :: "r"(to), "l"(p), "r"(index) : "memory"); }
DEV int ldg32(const int* p) { int r; asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(r) : "l"(p)); return r; }
DEV void stg128(uint8_t* p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory"); }
DEV void bar_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(b), "r"(n) : "memory"); }
DEV void arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(b) : "memory"); }
DEV void expect(uint32_t b, int n) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(b), "r"(n) : "memory"); }
DEV void wait(uint32_t b, uint32_t parity) {
  asm volatile("{ .reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra E;\nbra W;\nE: }\n" :: "r"(b), "r"(parity) : "memory");
}
DEV void bulk(uint32_t dst, const uint8_t* src, int n, uint32_t b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(dst), "l"(src), "r"(n), "r"(b) : "memory");
}
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void mma_s(float (&d)[32], uint64_t a, uint64_t b, int keep) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n}\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
    : "l"(a), "l"(b), "r"(keep));
}
__device__ __forceinline__ void mma_o(float (&d)[64], uint64_t a, uint64_t b, int keep) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 1;\n}\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
    : "l"(a), "l"(b), "r"(keep));
}


DEV uint64_t desc(uint32_t addr, uint32_t lbo, uint32_t sbo) {
  return (uint64_t)((addr >> 4) & 0x3FFF) | (uint64_t)(lbo >> 4) << 16 | (uint64_t)(sbo >> 4) << 32 | (uint64_t)1 << 62;
}

// e8m0 -> two halves of 2^(code - 127 + 16 - 7 ...), see word8
DEV uint32_t scale_w(uint32_t code) {
  const int f = (int)code - 111;
  const uint32_t h = f >= 1 ? (uint32_t)min(f, 30) << 10 : 0x400u >> min(1 - f, 31);
  return h * 0x10001u;
}
// one word of eight e2m1 codes, dims d..d+7 -> four pairs (d, d+4), times 2^-7
DEV void word4(uint32_t at, uint32_t w, uint32_t s) {
  uint32_t r0 = lop_or(w << 12, 0x80008000u, (w << 9) & 0x0E000E00u);
  uint32_t r1 = lop_or(w << 8, 0x80008000u, (w << 5) & 0x0E000E00u);
  uint32_t r2 = lop_or(w << 4, 0x80008000u, (w << 1) & 0x0E000E00u);
  uint32_t r3 = lop_or(w, 0x80008000u, (w >> 3) & 0x0E000E00u);
  sts128(at, hmul2(r0, s), hmul2(r1, s), hmul2(r2, s), hmul2(r3, s));
}
// eight e4m3 codes in two words -> four pairs (d, d+4), times 2^-7
DEV void word8(uint32_t at, uint32_t a, uint32_t b, uint32_t s) {
  uint32_t r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t t = prmt(a, b, i | i << 4 | i << 8 | (4 + i) << 12);
    r[i] = hmul2(lop_or(t, 0x80008000u, (t >> 1) & 0x3F803F80u), s);
  }
  sts128(at, r[0], r[1], r[2], r[3]);
}

#ifdef TRACE
#define T(id) { if (blockIdx.x == 0 && lane_t == 0 && n_t < 2000) { uint32_t c; asm volatile("mov.u32 %0, %%clock;" : "=r"(c) :: "memory"); p.trace[wg * 4096 + 2 * n_t] = id; p.trace[wg * 4096 + 2 * n_t + 1] = c; n_t++; } }
#else
#define T(id)
#endif
struct Rows { int row, tile, sub; };

// loads 1/128 (per thread) of the queries of a row: items of 16 dims of a head
template <int N> DEV void load_q(const uint8_t* q, uint32_t smem, int thread_, int threads, int first) {  // items first + i * threads + thread
  const int thread = hide(thread_);
  uint32_t e[N][4], o[N][4];
#pragma unroll
  for (int i = 0; i < N; i++) {
    int item = first + i * threads + thread;
    const uint8_t* p = q + (item >> 5) * (2 * D) + (item & 31) * 16;
    ldg128(p, e[i]); ldg128(p + D, o[i]);
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    int item = first + i * threads + thread, h = item >> 5, x = item & 31;
    uint32_t base = smem + SM_Q + (x >> 2) * PANEL + h * 128;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      uint32_t e0 = e[i][2 * c], e1 = e[i][2 * c + 1], o0 = o[i][2 * c], o1 = o[i][2 * c + 1];
      // e0 = dims (0,2), e1 = (4,6), o0 = (1,3), o1 = (5,7)
      uint32_t w0 = f16x2(bits(e0 << 16), bits(e1 << 16)), w1 = f16x2(bits(o0 << 16), bits(o1 << 16));
      uint32_t w2 = f16x2(bits(e0 & 0xFFFF0000u), bits(e1 & 0xFFFF0000u)), w3 = f16x2(bits(o0 & 0xFFFF0000u), bits(o1 & 0xFFFF0000u));
      sts128(base + ((((2 * x + c) & 7) ^ (h & 7)) << 4), seen(w0), seen(w1), seen(w2), seen(w3));
    }
  }
}

DEV void rescale(float (&o)[64], uint32_t misc, int s, int warp, int lane) {
  if (lds32(misc + OFF_FLAG + 16 * s + 4 * warp)) {
    int r = 16 * warp + (lane >> 2);
    float a0 = bits(lds16(misc + OFF_ALPHA + 128 * s + 2 * r) << 16), a1 = bits(lds16(misc + OFF_ALPHA + 128 * s + 2 * r + 16) << 16);
#pragma unroll
    for (int j = 0; j < 16; j++) { o[4 * j] *= a0; o[4 * j + 1] *= a0; o[4 * j + 2] *= a1; o[4 * j + 3] *= a1; }
  }
}

DEV void issue_pv(float (&o)[64], uint32_t smem_, int s, int wg, int keep) {
  const uint32_t smem = hide(smem_);
  uint64_t a = desc(smem + SM_P + s * 8192, 16, 1024), b = desc(smem + SM_K + s * 65536 + wg * 2 * PANEL, PANEL, 1024);
  wg_fence();
#pragma unroll
  for (int k = 0; k < NV; k++) mma_o(o, a + 2 * k, b + 128 * k, k ? 1 : keep);
  wg_commit();
}

DEV void store_o(float (&o)[64], float f0, float f1, int units, uint8_t* out, int wg, int warp, int lane_) {  // units: bit a = 32 of the 128 columns
  const int lane = hide(lane_);
  int r = 16 * warp + (lane >> 2), q = lane & 3;
  int src = (lane & 28) | (q >> 1);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float f = half ? f1 : f0;
    uint8_t* p = out + (r + 8 * half) * (2 * D) + (q >> 1) * D + (16 * wg + 2 * (q & 1)) * 8;
#pragma unroll
    for (int a = 0; a < 4; a++) {
      if (!(units >> a & 1)) continue;
      uint32_t w[4], x[2], y[2];
#pragma unroll
      for (int j = 0; j < 4; j++) w[j] = bf16x2(o[4 * (4 * a + j) + 2 * half] * f, o[4 * (4 * a + j) + 2 * half + 1] * f);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint32_t x0 = __shfl_sync(0xFFFFFFFFu, w[j], src), x1 = __shfl_sync(0xFFFFFFFFu, w[2 + j], src);
        uint32_t y0 = __shfl_sync(0xFFFFFFFFu, w[j], src + 2), y1 = __shfl_sync(0xFFFFFFFFu, w[2 + j], src + 2);
        x[j] = q & 1 ? x1 : x0; y[j] = q & 1 ? y1 : y0;
      }
      stg128(p + 32 * a, prmt(x[0], y[0], 0x5410), prmt(x[0], y[0], 0x7632), prmt(x[1], y[1], 0x5410), prmt(x[1], y[1], 0x7632));
    }
  }
}

DEV void store_row(float (&o)[64], uint32_t fin, uint8_t* out, int wg, int warp, int lane) {
  const uint32_t at = fin + 4 * (16 * warp + (lane >> 2));
  store_o(o, bits(lds32(at)), bits(lds32(at + 32)), 15, out, wg, warp, lane);
}

DEV void cluster_sync() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEV uint32_t in_block(uint32_t a, int rank) { uint32_t r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank)); return r; }
DEV float ldc(uint32_t a) { float r; asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(a) : "memory"); return r; }

// The parts of a row, of the blocks of a cluster, in their order. Every block left maxima and sums of its heads at `state`; its sums of
// values go where its keys were, and it takes 32 columns of every `parts` times 32.
DEV void merge(float (&o)[64], const Params& p, uint32_t smem, uint32_t state, int rank, int row, int wg, int warp, int lane) {
  cluster_sync();  // also: no product reads queries or keys any more
  for (int k = threadIdx.x; k < 128 * p.parts; k += 512) sts32(smem + SM_Q + 4 * k, __float_as_uint(ldc(in_block(state + 4 * (k & 127), k >> 7))));
  __syncthreads();
  const int r = 16 * warp + (lane >> 2);
  float f[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t at = smem + SM_Q + 4 * (r + 8 * half);
    float top = -1e30f, total = 0.f;
    for (int b = 0; b < p.parts; b++) top = fmaxf(top, bits(lds32(at + 512 * b)));
    for (int b = 0; b < p.parts; b++) total += bits(lds32(at + 512 * b + 256)) * ex2(bits(lds32(at + 512 * b)) - top);
    total += ex2(p.sink[r + 8 * half] * 1.4426950408889634f - top);
    f[half] = total > 0.f ? 128.f * ex2(bits(lds32(at + 512 * rank)) - top) / total : 0.f;  // nothing, not even a sink
  }
  const uint32_t mine = smem + SM_K + (wg * 16 * 128 + (threadIdx.x & 127)) * 16;
#pragma unroll
  for (int j = 0; j < 16; j++) {
    sts128(mine + j * 2048, __float_as_uint(o[4 * j] * f[0]), __float_as_uint(o[4 * j + 1] * f[0]), __float_as_uint(o[4 * j + 2] * f[1]), __float_as_uint(o[4 * j + 3] * f[1]));
    o[4 * j] = o[4 * j + 1] = o[4 * j + 2] = o[4 * j + 3] = 0.f;
  }
  cluster_sync();
  int units = 0;
#pragma unroll
  for (int a = 0; a < 4; a++) {
    if ((4 * wg + a) % p.parts != rank) continue;
    units |= 1 << a;
#pragma unroll 4
    for (int b = 0; b < p.parts; b++) {
#pragma unroll
      for (int j = 4 * a; j < 4 * a + 4; j++) {
        float x[4];
        asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(in_block(mine + j * 2048, b)) : "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) o[4 * j + k] += x[k];
      }
    }
  }
  store_o(o, 1.f, 1.f, units, p.out + (int64_t)row * (2 * H * D), wg, warp, lane);
  cluster_sync();  // others may still read what this block left
}

extern "C" __global__ void __launch_bounds__(512, 1) attention(const Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t smem; asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(smem) : "l"(memory));
  const uint32_t misc = smem + SM_MISC, bars = misc + OFF_BAR;
  const int wg = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; s++) { bar_init(bars + BAR_FULL + 8 * s, 8); bar_init(bars + BAR_EMPTY + 8 * s, 16); bar_init(bars + BAR_P + 8 * s, 4); }
    bar_init(bars + BAR_QFULL, 12); bar_init(bars + BAR_QFREE, 4); bar_init(bars + BAR_FIN, 4); bar_init(bars + BAR_RAW, 128); bar_init(bars + BAR_RAWFREE, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // Launched while the kernel before still ends: from here on its results are there. The next one may be launched as well.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // A cluster of `parts` blocks shares a row: block `rank` of it has tiles t0 .. t0 + tiles - 1 of all, compressed ones first.
  const int rank = (int)blockIdx.x % p.parts, first = (int)blockIdx.x / p.parts, step = (int)gridDim.x / p.parts;
  const int all_ct = (p.K + B - 1) / B, all = all_ct + (p.W + B - 1) / B, part = (all + p.parts - 1) / p.parts, t0 = rank * part;
  const int tiles = min(part, all - t0), ct = min(max(all_ct - t0, 0), tiles);
  const int mine = (p.rows - first + step - 1) / step;
  const int total = mine * tiles;
#ifdef TRACE
  const int lane_t = threadIdx.x & 127; int n_t = 0;
#endif
  float o[64];
  T(0)
  if (wg == 0) {  // logits, softmax
    float s[32];
    load_q<8>(p.q + (int64_t)first * (2 * H * D), smem, threadIdx.x, 128, 0);
    fence_async();
    __syncwarp();
    if (lane == 0) arrive(bars + BAR_QFULL);
    int g = 0;
    for (int i = 0; i < mine; i++) {
      const int64_t row = first + (int64_t)i * step;
      float m0 = -1e30f, m1 = -1e30f, l0 = 0.f, l1 = 0.f;
      wait(bars + BAR_QFULL, i & 1);
      for (int t = 0; t < tiles; t++, g++) {
        const int st = g & 1, ph = (g >> 1) & 1;
        T(1) wait(bars + BAR_FULL + 8 * st, ph); CFENCE(); T(2)
        const uint32_t here = hide(smem);
        uint64_t a = desc(here + SM_Q, 16, 1024), b = desc(here + SM_K + st * 65536, 16, 1024);
        wg_fence();
#pragma unroll
        for (int k = 0; k < NK; k++) mma_s(s, a + (k >> 2) * 512 + (k & 3) * 2, b + (k >> 2) * 512 + (k & 3) * 2, k ? 1 : 0);
        wg_commit();
        const uint32_t lo = lds32(misc + OFF_MASK + 8 * (g & 3)), hi = lds32(misc + OFF_MASK + 8 * (g & 3) + 4);
        wg_wait<0>(); T(3)
        if (lane == 0 && t == tiles - 1) arrive(bars + BAR_QFREE);
        const int q2 = 2 * (lane & 3);
        if ((lo & hi) != 0xFFFFFFFFu) {
#pragma unroll
          for (int j = 0; j < 8; j++) {
            uint32_t bit = ((j < 4 ? lo : hi) >> (8 * (j & 3) + q2));
            if (!(bit & 1)) s[4 * j] = s[4 * j + 2] = -__int_as_float(0x7f800000);
            if (!(bit & 2)) s[4 * j + 1] = s[4 * j + 3] = -__int_as_float(0x7f800000);
          }
        }
        float x0 = fmaxf(s[0], s[1]), x1 = fmaxf(s[2], s[3]);
#pragma unroll
        for (int j = 1; j < 8; j++) { x0 = fmaxf(x0, fmaxf(s[4 * j], s[4 * j + 1])); x1 = fmaxf(x1, fmaxf(s[4 * j + 2], s[4 * j + 3])); }
        x0 *= p.scale2; x1 *= p.scale2;
        const bool any = __any_sync(0xFFFFFFFFu, x0 > m0 + 8.f || x1 > m1 + 8.f);  // else the maxima may stay
        float a0 = 1.f, a1 = 1.f;
        if (any) {
          x0 = fmaxf(x0, __shfl_xor_sync(0xFFFFFFFFu, x0, 1)); x1 = fmaxf(x1, __shfl_xor_sync(0xFFFFFFFFu, x1, 1));
          x0 = fmaxf(x0, __shfl_xor_sync(0xFFFFFFFFu, x0, 2)); x1 = fmaxf(x1, __shfl_xor_sync(0xFFFFFFFFu, x1, 2));
          float n0 = x0 > m0 + 8.f ? ceilf(x0) : m0, n1 = x1 > m1 + 8.f ? ceilf(x1) : m1;
          a0 = ex2(m0 - n0); a1 = ex2(m1 - n1);
          l0 *= a0; l1 *= a1; m0 = n0; m1 = n1;
          if ((lane & 3) == 0) {
            sts16(misc + OFF_ALPHA + 128 * st + 2 * (16 * warp + (lane >> 2)), __float_as_uint(a0) >> 16);
            sts16(misc + OFF_ALPHA + 128 * st + 2 * (16 * warp + (lane >> 2) + 8), __float_as_uint(a1) >> 16);
          }
        }
        if (lane == 0) sts32(misc + OFF_FLAG + 16 * st + 4 * warp, any && t);
        const int r = hide(16 * warp + (lane >> 2));
        const uint32_t pa = smem + SM_P + st * 8192 + r * 128 + 2 * q2;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          float e0 = EX(fmaf(s[4 * j], p.scale2, -m0)), e1 = EX(fmaf(s[4 * j + 1], p.scale2, -m0));
          float e2 = EX(fmaf(s[4 * j + 2], p.scale2, -m1)), e3 = EX(fmaf(s[4 * j + 3], p.scale2, -m1));
          l0 += e0 + e1; l1 += e2 + e3;
          sts32(pa + ((j ^ (r & 7)) << 4), f16x2(e0, e1));
          sts32(pa + 1024 + ((j ^ (r & 7)) << 4), f16x2(e2, e3));
        }
        fence_async();
        __syncwarp();
        if (lane == 0) arrive(bars + BAR_P + 8 * st);
        T(4)
        if (any && t) {
#pragma unroll
          for (int j = 0; j < 16; j++) { o[4 * j] *= a0; o[4 * j + 1] *= a0; o[4 * j + 2] *= a1; o[4 * j + 3] *= a1; }
        }
        asm volatile("bar.sync 1, 128;" ::: "memory"); T(6)
        issue_pv(o, smem, st, 0, t != 0);
        wg_wait<0>(); T(7)
        if (lane == 0) arrive(bars + BAR_EMPTY + 8 * st);
      }
      l0 += __shfl_xor_sync(0xFFFFFFFFu, l0, 1); l1 += __shfl_xor_sync(0xFFFFFFFFu, l1, 1);
      l0 += __shfl_xor_sync(0xFFFFFFFFu, l0, 2); l1 += __shfl_xor_sync(0xFFFFFFFFu, l1, 2);
      const int r = 16 * warp + (lane >> 2);
      if ((lane & 3) == 0) {
        const uint32_t fin = misc + OFF_FIN + 256 * (i & 1) + 4 * r;
        if (p.parts > 1) {  // i = 0
          sts32(fin, __float_as_uint(m0)); sts32(fin + 32, __float_as_uint(m1)); sts32(fin + 256, __float_as_uint(l0)); sts32(fin + 288, __float_as_uint(l1));
        } else {
          l0 += ex2(p.sink[r] * 1.4426950408889634f - m0); l1 += ex2(p.sink[r + 8] * 1.4426950408889634f - m1);
          sts32(fin, __float_as_uint(l0 > 0.f ? 128.f / l0 : 0.f)); sts32(fin + 32, __float_as_uint(l1 > 0.f ? 128.f / l1 : 0.f));
        }
      }
      __syncwarp();
      if (p.parts > 1) break;
      if (lane == 0) arrive(bars + BAR_FIN);
      T(8) store_row(o, misc + OFF_FIN + 256 * (i & 1), p.out + row * (2 * H * D), 0, warp, lane);
    }
  } else if (wg == 1) {  // asks for records; half of the next queries
    const int thread = threadIdx.x & 127;
    int nt = 0, half = 0, ahead = mine, unit = 0, asked = 0, index = -1;
    auto indices = [&]() {  // lanes 0..15: keys 16 * warp + lane of a compressed tile; 0..7: of half a window tile
      index = -1;
      if (ahead <= 0) return;
      const int64_t row = first + (int64_t)(mine - ahead) * step;
      if (nt < ct) {
        const int k = (t0 + nt) * B + 16 * warp + lane;
        if (lane < 16 && k < p.K) index = ldg32(p.kidx + row * p.kstride + (int64_t)k * p.kstep);
      } else {
        const int k = (t0 + nt - all_ct) * B + 16 * warp + (lane >> 2) * 8 + 4 * half + (lane & 3);
        if (lane < 8 && k < p.W) index = ldg32(p.widx + row * p.wstride + (int64_t)k * p.wstep);
      }
    };
    auto ask = [&]() {  // the next unit: a compressed tile, or half a window tile
      if (ahead <= 0) return;
      const bool w = nt >= ct;
      T(20) wait(bars + BAR_RAWFREE, (unit & 1) ^ 1); T(21)
      const uint32_t valid = __ballot_sync(0xFFFFFFFFu, index >= 0);
      if (lane == 0) {
        const uint32_t mask = misc + OFF_MASK + 8 * (asked & 3) + 2 * warp;
        if (!w) sts16(mask, valid);
        else {
          const uint32_t v = ((valid & 15) | (valid & 0xF0) << 4) << (4 * half);
          sts16(mask, half ? lds16(mask) | v : v);
        }
      }
      const int ln = hide(lane);
      if (w) {
#pragma unroll
        for (int k = 0; k < 9; k++) {
          const int chunk = ln + 32 * k, rec = (chunk * 993) >> 15, off = chunk - 33 * rec;
          const int id = __shfl_sync(0xFFFFFFFFu, index, rec & 7);
          copy_if(smem + SM_RAW + (8 * warp + rec) * 576 + off * 16, p.wpool + (int64_t)id * 528 + off * 16, chunk < 264 ? id : -1);
        }
      } else {
#pragma unroll
        for (int k = 0; k < 9; k++) {
          const int chunk = ln + 32 * k, rec = (chunk * 57) >> 10, off = chunk - 18 * rec;
          const int id = __shfl_sync(0xFFFFFFFFu, index, rec);
          copy_if(smem + SM_RAW + 16 * warp * 288 + chunk * 16, p.kpool + (int64_t)id * 288 + off * 16, id);
        }
      }
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(bars + BAR_RAW) : "memory");
      unit++;
      if (w && half == 0) half = 1;
      else { half = 0; asked++; if (++nt == tiles) { nt = 0; ahead--; } }
      T(22)
    };
    indices();
    int t = 0, i = 0, allowed = ct ? 2 : 3;  // units up to tile g + 1 and one more: what the unpackers make room for before P of tile g
#pragma unroll 1
    for (int g = 0; g < total; g++) {
      const int st = g & 1;
      allowed += (t + 1 == tiles ? 0 : t + 1) < ct ? 1 : 2;
      while (ahead > 0 && unit < allowed) { ask(); indices(); }
      T(5) wait(bars + BAR_P + 8 * st, (g >> 1) & 1); CFENCE(); T(6)
      rescale(o, misc, st, warp, lane);
      issue_pv(o, smem, st, 1, t != 0);
      wg_wait<0>(); T(7)
      if (lane == 0) arrive(bars + BAR_EMPTY + 8 * st);
      if (++t == tiles) {
        if (i + 1 < mine) {
          wait(bars + BAR_QFREE, i & 1);
          const uint8_t* q = p.q + (first + (int64_t)(i + 1) * step) * (2 * H * D);
#pragma unroll 1
          for (int b = 0; b < 2; b++) load_q<4>(q, smem, thread, 128, 512 * b);
          fence_async();
          __syncwarp();
          if (lane == 0) arrive(bars + BAR_QFULL);
        }
        if (p.parts > 1) break;
        wait(bars + BAR_FIN, i & 1);
        T(8) store_row(o, misc + OFF_FIN + 256 * (i & 1), p.out + (first + (int64_t)i * step) * (2 * H * D), 1, warp, lane);
        i++; t = 0;
      }
    }
  } else {  // unpack records; the other half of the next queries
    const int u = warp + 4 * (wg - 2), other = threadIdx.x & 255;
    load_q<4>(p.q + (int64_t)first * (2 * H * D), smem, other, 256, 1024);
    fence_async();
    __syncwarp();
    if (lane == 0) arrive(bars + BAR_QFULL);
    int t = -1, i = 0, unit = 0;
    uint32_t w[4][4], sc[4], keep = 0;
    // a lane takes one of eight keys and every fourth chunk of 16 bytes (compressed), one of four keys and every eighth chunk (window)
    auto take = [&](int g, bool window, int half) {
      const int ln = hide(lane);
      const uint32_t raw = hide(smem) + SM_RAW;
      T(10) wait(bars + BAR_RAW, unit & 1); T(11)
      const uint32_t mask = lds8(misc + OFF_MASK + 8 * (g & 3) + u);
      if (!window) {
        const int key = ((ln >> 3) & 1) * 4 + ((ln >> 1) & 3), c0 = (ln >> 4) * 2 + (ln & 1);
        const uint32_t slot = raw + (8 * u + key) * 288;
#pragma unroll
        for (int it = 0; it < 4; it++) { lds128(slot + (4 * it + c0) * 16, w[it]); sc[it] = lds16(slot + 256 + 2 * (4 * it + c0)); }
        keep = (mask >> key) & 1 ? 0x78007800u : 0u;
      } else {
        const int key = ((ln >> 3) & 1) * 2 + ((ln >> 2) & 1), c0 = (ln >> 4) * 4 + (ln & 3);
        const uint32_t slot = raw + (4 * u + key) * 576;
#pragma unroll
        for (int it = 0; it < 4; it++) { lds128(slot + (8 * it + c0) * 16, w[it]); sc[it] = lds8(slot + 512 + ((8 * it + c0) >> 1)); }
        keep = (mask >> (4 * half + key)) & 1 ? 0xFFFFFFFFu : 0u;
      }
      ARRIVED(w, sc);
      __syncwarp();
      if (ln == 0) arrive(bars + BAR_RAWFREE);
      unit++; T(12)
    };
    take(0, ct == 0, 0);
#pragma unroll 1
    for (int g = -1; g < total; g++) {
      if (g + 1 < total) {  // tile g + 1
        const int t1 = t + 1 == tiles ? 0 : t + 1, s1 = (g + 1) & 1;
        const int ln = hide(lane);
        const uint32_t tile = hide(smem) + SM_K + s1 * 65536;
        wait(bars + BAR_EMPTY + 8 * s1, (((g + 1) >> 1) & 1) ^ 1); T(13)
        if (t1 < ct) {
          const int key = ((ln >> 3) & 1) * 4 + ((ln >> 1) & 3), c0 = (ln >> 4) * 2 + (ln & 1);
          const uint32_t base = tile + (c0 >> 1) * PANEL + (8 * u + key) * 128, x0 = (((c0 & 1) * 4) ^ key) << 4;
#pragma unroll
          for (int it = 0; it < 4; it++) {
            const uint32_t at = base + 2 * it * PANEL + x0;
            const uint32_t s2 = hmul2(((sc[it] & 0x7Fu) << 7) | ((sc[it] & 0x7F00u) << 15), keep);
            const uint32_t sl = prmt(s2, 0, 0x1010), sh = prmt(s2, 0, 0x3232);
            WORD4(at, w[it][0], sl); WORD4(at ^ 16, w[it][1], sl);
            WORD4(at ^ 32, w[it][2], sh); WORD4(at ^ 48, w[it][3], sh);
          }
        } else {
#pragma unroll 1
          for (int half = 0; half < 2; half++) {
            const int key = ((ln >> 3) & 1) * 2 + ((ln >> 2) & 1), c0 = (ln >> 4) * 4 + (ln & 3), k8 = 4 * half + key;
            const uint32_t base = tile + (c0 >> 2) * PANEL + (8 * u + k8) * 128, x0 = (((c0 & 3) * 2) ^ k8) << 4;
#pragma unroll
            for (int it = 0; it < 4; it++) {
              const uint32_t h = scale_w(sc[it]) & keep, at = base + 2 * it * PANEL + x0;
              word8(at, w[it][0], w[it][1], h); word8(at ^ 16, w[it][2], w[it][3], h);
            }
            if (half == 0) take(g + 1, true, 1);
          }
        }
        T(14) PFENCE(); T(15)
        __syncwarp();
        if (ln == 0) arrive(bars + BAR_FULL + 8 * s1);
      }
      const bool more = g + 2 < total;
      const int t2 = t + 2 >= tiles ? t + 2 - tiles : t + 2;
      if (g < 0) { if (more) take(1, tiles == 1 ? ct == 0 : 1 >= ct, 0); t = 0; continue; }
      const int st = g & 1;
      T(5) wait(bars + BAR_P + 8 * st, (g >> 1) & 1); CFENCE(); T(6)
      rescale(o, misc, st, warp, lane);
      issue_pv(o, smem, st, wg, t != 0);
      if (more) take(g + 2, (t2 >= tiles ? t2 - tiles : t2) >= ct, 0);  // under the product
      wg_wait<0>(); T(7)
      if (lane == 0) arrive(bars + BAR_EMPTY + 8 * st);
      if (++t == tiles) {
        if (i + 1 < mine) {
          wait(bars + BAR_QFREE, i & 1);
          load_q<4>(p.q + (first + (int64_t)(i + 1) * step) * (2 * H * D), smem, other, 256, 1024);
          fence_async();
          __syncwarp();
          if (lane == 0) arrive(bars + BAR_QFULL);
        }
        if (p.parts > 1) break;
        wait(bars + BAR_FIN, i & 1);
        T(8) store_row(o, misc + OFF_FIN + 256 * (i & 1), p.out + (first + (int64_t)i * step) * (2 * H * D), wg, warp, lane);
        i++; t = 0;
      }
    }
  }
  if (p.parts > 1) merge(o, p, smem, misc + OFF_FIN, rank, first, wg, warp, lane);
}
