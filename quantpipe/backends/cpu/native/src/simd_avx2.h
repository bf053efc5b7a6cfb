// AVX2 with FMA and F16C, and AVX-VNNI where the unit is compiled for it. Names: see simd_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qp {
namespace {

struct Avx2 {
    static constexpr int W = 8;
#ifdef __AVXVNNI__
    static constexpr bool kHasByteDot = true;
#else
    static constexpr bool kHasByteDot = false;
#endif
    static constexpr int kTileRows = 6;
    static constexpr int kTileVectors = 2;

    using F = __m256;
    using I = __m256i;

    static F zero() { return _mm256_setzero_ps(); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static float sum(F a) {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    static float largest(F a) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }

    static I izero() { return _mm256_setzero_si256(); }
    static I iset(int32_t x) { return _mm256_set1_epi32(x); }
    static I iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static void istore(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
    static I ibroadcast(const void* p) {
        return _mm256_castps_si256(_mm256_broadcast_ss(static_cast<const float*>(p)));
    }
    static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
    static I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
    static I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
    static I iand(I a, I b) { return _mm256_and_si256(a, b); }
    template <int kBits>
    static I shift_left(I a) {
        return _mm256_slli_epi32(a, kBits);
    }
    template <int kBits>
    static I shift_right(I a) {
        return _mm256_srli_epi32(a, kBits);
    }
    template <int kBits>
    static I shift_right_16(I a) {
        return _mm256_srli_epi16(a, kBits);
    }
    static int32_t isum(I a) {
        __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        x = _mm_add_epi32(x, _mm_shuffle_epi32(x, _MM_SHUFFLE(1, 0, 3, 2)));
        return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, _MM_SHUFFLE(2, 3, 0, 1))));
    }

    static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
    static I round(F a) { return _mm256_cvtps_epi32(a); }
    static F as_float(I a) { return _mm256_castsi256_ps(a); }
    static I as_int(F a) { return _mm256_castps_si256(a); }

    static F load_bf16(const uint16_t* p) { return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half(p)), 16)); }
    static F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(half(p)); }
    static I load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
    static I load_s8(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
    static void store_s8(int8_t* p, I a) {
        const __m128i words = narrow(a);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
    }
    static void store_s16_in_pairs(int16_t* p, I a) {
        constexpr int kOrder = _MM_SHUFFLE(3, 1, 2, 0);
        const __m128i words = _mm_shufflehi_epi16(_mm_shufflelo_epi16(narrow(a), kOrder), kOrder);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), words);
    }

#ifdef __AVXVNNI__
    static I dot2(I sum, I w, I a) { return _mm256_dpwssd_avx_epi32(sum, w, a); }
    static I dot4(I sum, I w, I a) { return _mm256_dpbusd_avx_epi32(sum, w, a); }
    static I nibble_dot4(I eighths, I w, I a) { return dot4(eighths, w, a); }
    static I add_nibble_sums(I sum, I eighths) { return iadd(sum, eighths); }
#else
    static I dot2(I sum, I w, I a) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, a)); }
    // Pairs of products in 16 bits: 8 * 2 * 15 * 128 fits.
    static I nibble_dot4(I eighths, I w, I a) {
        eighths = _mm256_add_epi16(eighths, _mm256_maddubs_epi16(w, a));
        // Else compilers put all products down in memory before they add the first.
        asm("" : "+x"(eighths));
        return eighths;
    }
    static I add_nibble_sums(I sum, I eighths) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(eighths, _mm256_set1_epi16(1)));
    }
#endif

   private:
    static __m128i half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static __m128i narrow(I a) { return _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)); }
};

}  // namespace
}  // namespace qp
