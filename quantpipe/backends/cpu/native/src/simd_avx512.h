// AVX-512 F, BW, VL, DQ and VNNI. Names: see simd_scalar.h.
#pragma once

#include <immintrin.h>

// What intrinsics leave undefined on purpose, some compilers take for an oversight.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <cstdint>

namespace qp {
namespace {

struct Avx512 {
    static constexpr int W = 16;
    static constexpr bool kHasByteDot = true;
    static constexpr int kTileRows = 12;
    static constexpr int kTileVectors = 2;

    using F = __m512;
    using I = __m512i;

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static float sum(F a) { return _mm512_reduce_add_ps(a); }
    static float largest(F a) { return _mm512_reduce_max_ps(a); }

    static I izero() { return _mm512_setzero_si512(); }
    static I iset(int32_t x) { return _mm512_set1_epi32(x); }
    static I iload(const void* p) { return _mm512_loadu_si512(p); }
    static void istore(void* p, I x) { _mm512_storeu_si512(p, x); }
    static I ibroadcast(const void* p) {
        int32_t x;
        __builtin_memcpy(&x, p, sizeof x);
        return _mm512_set1_epi32(x);
    }
    static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
    static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
    static I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
    static I iand(I a, I b) { return _mm512_and_si512(a, b); }
    template <int kBits>
    static I shift_left(I a) {
        return _mm512_slli_epi32(a, kBits);
    }
    template <int kBits>
    static I shift_right(I a) {
        return _mm512_srli_epi32(a, kBits);
    }
    template <int kBits>
    static I shift_right_16(I a) {
        return _mm512_srli_epi16(a, kBits);
    }
    static int32_t isum(I a) { return _mm512_reduce_add_epi32(a); }

    static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    static I round(F a) { return _mm512_cvtps_epi32(a); }
    static F as_float(I a) { return _mm512_castsi512_ps(a); }
    static I as_int(F a) { return _mm512_castps_si512(a); }

    static F load_bf16(const uint16_t* p) { return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half(p)), 16)); }
    static F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(half(p)); }
    static I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static I load_s8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static void store_s8(int8_t* p, I a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
    }
    static void store_s16_in_pairs(int16_t* p, I a) {
        constexpr int kOrder = _MM_SHUFFLE(3, 1, 2, 0);
        const __m256i words = _mm512_cvtepi32_epi16(a);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, kOrder), kOrder));
    }

    static I dot2(I sum, I w, I a) { return _mm512_dpwssd_epi32(sum, w, a); }
    static I dot4(I sum, I w, I a) { return _mm512_dpbusd_epi32(sum, w, a); }
    static I nibble_dot4(I eighths, I w, I a) { return dot4(eighths, w, a); }
    static I add_nibble_sums(I sum, I eighths) { return iadd(sum, eighths); }

   private:
    static __m256i half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
};

}  // namespace
}  // namespace qp
