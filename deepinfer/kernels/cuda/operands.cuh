// Queries and records as FP16 operands of the products.
//
// Both products read tiles of 64 rows (heads or keys) of 512 dims: eight panels of 64 dims, rows of 128 bytes, whose
// 16-byte columns are swizzled (column ^ row % 8). A column holds eight dims d .. d + 7 in pairs (d, d + 4): so the
// eight nibbles of a word become four words by masks and shifts alone. Queries are put in the same order, and sums of
// values are put back when they are stored.
#pragma once
#include "layout.cuh"

DEV uint32_t column(int c, int row) { return (uint32_t)(c ^ (row & 7)) << 4; }

// Eight e2m1 codes, nibbles of w, times two equal halves: a code's sign, exponent and fraction are bits of a half's own,
// worth 2^-14 of its value.
DEV void put_entry_word(uint32_t at, uint32_t w, uint32_t scale) {
  const uint32_t signs = 0x80008000u, rest = 0x0E000E00u;
  store128(at, multiply_halves(and_or(w << 12, signs, (w << 9) & rest), scale),
           multiply_halves(and_or(w << 8, signs, (w << 5) & rest), scale),
           multiply_halves(and_or(w << 4, signs, (w << 1) & rest), scale),
           multiply_halves(and_or(w, signs, (w >> 3) & rest), scale));
}
// Two e4m3 scales (bytes of a 16-bit word) -> two halves, times 2^14 / KEY_SCALE = 2^7: what the codes lack.
// 0x78007800 = 2^15, and a scale's bits as a half's are worth 2^-8 of it. 0 where the key is not there.
DEV uint32_t entry_scales(uint32_t codes, bool real) {
  return multiply_halves(((codes & 0x7Fu) << 7) | ((codes & 0x7F00u) << 15), real ? 0x78007800u : 0u);
}

// Eight e4m3 codes, bytes of two words, times two equal halves: as halves they are worth 2^-8 of their values. No bits
// of a code make a number that is not finite.
DEV void put_window_words(uint32_t at, uint32_t a, uint32_t b, uint32_t scale) {
  uint32_t r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t pair = bytes_of(a, b, i | i << 4 | i << 8 | (4 + i) << 12);  // bytes i, i, i, 4 + i
    r[i] = multiply_halves(and_or(pair, 0x80008000u, (pair >> 1) & 0x3F803F80u), scale);
  }
  store128(at, r[0], r[1], r[2], r[3]);
}
// An e8m0 scale, 2^(code - 127) -> two halves, times 2^8 / KEY_SCALE = 2: exponent code - 111 of a half, below 1 a
// subnormal one. Codes above 141, keys of seven million, do not fit: NaN (0x7E00), so that nobody takes them for keys.
DEV uint32_t window_scale(uint32_t code, bool real) {
  const int exponent = (int)code - 111;
  const uint32_t fits = exponent >= 1 ? (uint32_t)exponent << 10 : 0x400u >> min(1 - exponent, 31);
  const uint32_t half = exponent > 30 ? 0x7E00u : fits;
  return real ? half * 0x10001u : 0u;
}

// This thread's four of the 2,048 pieces of 16 dims of a row's queries. Values beyond FP16 become NaN, and so does the
// row's result.
DEV void put_queries(const Block& b, const uint8_t* queries) {
  constexpr int N = 4, THREADS = 512;
  const int thread = fresh(threadIdx.x);
  uint32_t even[N][4], odd[N][4];
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int piece = i * THREADS + thread;
    const uint8_t* from = queries + (piece >> 5) * ROW + (piece & 31) * 16;  // eight even dims; eight odd ones half a row on
    read128(from, even[i]);
    read128(from + ROW / 2, odd[i]);
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int piece = i * THREADS + thread, head = piece >> 5, x = piece & 31;
    const uint32_t to = b.shared + AT_QUERIES + (x >> 2) * PANEL + head * 128;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t e0 = even[i][2 * c], e1 = even[i][2 * c + 1], o0 = odd[i][2 * c], o1 = odd[i][2 * c + 1];  // dims (0 2) (4 6) (1 3) (5 7)
      const uint32_t high = 0xFFFF0000u;  // bf16 in the upper half is a float
      store128(to + column((2 * x + c) & 7, head), infinite_to_nan(to_halves(as_float(e0 << 16), as_float(e1 << 16))),
               infinite_to_nan(to_halves(as_float(o0 << 16), as_float(o1 << 16))),
               infinite_to_nan(to_halves(as_float(e0 & high), as_float(e1 & high))),
               infinite_to_nan(to_halves(as_float(o0 & high), as_float(o1 & high))));
    }
  }
  show_to_products();
  __syncwarp();
  if (b.lane == 0) arrive(b.bars().queries());
}

// Records on their way through registers: a thread has 64 bytes of one key and the scales of these.
struct Records {
  uint32_t words[4][4], scales[4];
  uint32_t mask;  // of the warp's eight keys: which are there

  // Eight compressed records: a thread takes chunks of 16 bytes, every fourth one of its key.
  DEV static int entry_key(int lane) { return ((lane >> 3) & 1) * 4 + ((lane >> 1) & 3); }
  DEV static int entry_chunk(int lane) { return (lane >> 4) * 2 + (lane & 1); }
  // Four window records: every eighth one.
  DEV static int window_key(int lane) { return ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1); }
  DEV static int window_chunk(int lane) { return (lane >> 4) * 4 + (lane & 3); }
  // These maps let eight neighbouring lanes read 128 bytes of different banks, and write to eight different columns.

  DEV void take_entries(uint32_t records, int lane) {
    const int c0 = entry_chunk(lane);
    const uint32_t from = records + entry_key(lane) * ENTRY;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      load128(from + (4 * i + c0) * 16, words[i]);
      scales[i] = load16(from + 256 + 2 * (4 * i + c0));
    }
  }
  DEV void take_windows(uint32_t records, int lane) {
    const int c0 = window_chunk(lane);
    const uint32_t from = records + window_key(lane) * WINDOW_PITCH;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      load128(from + (8 * i + c0) * 16, words[i]);
      scales[i] = load8(from + 512 + ((8 * i + c0) >> 1));
    }
  }
  // Waits until all of it is in registers, of which the last scale comes last: a load that is still under way does not
  // see that its place is written again.
  DEV void arrived() const { asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x12345678; @p nanosleep.u32 1; }" ::"r"(scales[3])); }
  // tile: of keys; row: of the warp's first key in it.
  DEV void put_entries(uint32_t tile, int row, int lane) const {
    const int key = entry_key(lane), c0 = entry_chunk(lane);
    const uint32_t to = tile + (c0 >> 1) * PANEL + (row + key) * 128 + column((c0 & 1) * 4, key);
    const bool real = (mask >> key) & 1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t at = to + 2 * i * PANEL, both = entry_scales(scales[i], real);
      const uint32_t first = bytes_of(both, 0, 0x1010), second = bytes_of(both, 0, 0x3232);  // of 16 dims each
      put_entry_word(at, words[i][0], first);
      put_entry_word(at ^ 16, words[i][1], first);
      put_entry_word(at ^ 32, words[i][2], second);
      put_entry_word(at ^ 48, words[i][3], second);
    }
  }
  DEV void put_windows(uint32_t tile, int row, int half, int lane) const {
    const int key = 4 * half + window_key(lane), c0 = window_chunk(lane);
    const uint32_t to = tile + (c0 >> 2) * PANEL + (row + key) * 128 + column((c0 & 3) * 2, key);
    const bool real = (mask >> key) & 1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t at = to + 2 * i * PANEL, scale = window_scale(scales[i], real);
      put_window_words(at, words[i][0], words[i][1], scale);
      put_window_words(at ^ 16, words[i][2], words[i][3], scale);
    }
  }
};
