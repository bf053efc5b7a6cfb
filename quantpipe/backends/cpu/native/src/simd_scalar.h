// Vectors without any particular instruction set: what every set offers under the same names, and what each name means.
//
// F is W float32 lanes, I is W lanes of 32 bits: integers, or two 16-bit or four 8-bit ones, the lowest first. With
// HasByteDot this is the model of the sets that multiply bytes exactly; without, of those that do not.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "small_floats.h"

namespace qp {
namespace {

// The compiler's own vectors, in whatever registers the CPU has.
template <int kLanes>
struct CompilerVectors;

template <>
struct CompilerVectors<8> {
    typedef float F __attribute__((vector_size(32)));
    typedef int32_t I __attribute__((vector_size(32)));
    typedef uint32_t U __attribute__((vector_size(32)));
};

template <>
struct CompilerVectors<16> {
    typedef float F __attribute__((vector_size(64)));
    typedef int32_t I __attribute__((vector_size(64)));
    typedef uint32_t U __attribute__((vector_size(64)));
};

template <int kLanes, bool HasByteDot>
struct Scalar {
    static constexpr int W = kLanes;
    static constexpr bool kHasByteDot = HasByteDot;
    // R and C of the tiles of a matrix product.
    static constexpr int kTileRows = HasByteDot ? 2 : 1;
    static constexpr int kTileVectors = 2;

    using F = typename CompilerVectors<W>::F;
    using I = typename CompilerVectors<W>::I;
    using U = typename CompilerVectors<W>::U;

    static F zero() { return F{}; }
    static F set(float x) { return F{} + x; }
    static F load(const float* p) { return load_as<F>(p); }
    static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F sqrt(F a) {
        for (int i = 0; i < W; ++i) a[i] = std::sqrt(a[i]);
        return a;
    }
    // a * b + c; rounded once where the CPU does so.
    static F fma(F a, F b, F c) { return a * b + c; }
    // b where either is a NaN.
    static F max(F a, F b) { return a > b ? a : b; }
    static F min(F a, F b) { return a < b ? a : b; }
    static F abs(F a) { return as_float(as_int(a) & 0x7fffffff); }
    static float sum(F a) {
        for (int width = W / 2; width > 0; width /= 2) {
            for (int i = 0; i < width; ++i) a[i] += a[i + width];
        }
        return a[0];
    }
    static float largest(F a) {
        float top = a[0];
        for (int i = 1; i < W; ++i) top = top > a[i] ? top : a[i];
        return top;
    }

    static I izero() { return I{}; }
    static I iset(int32_t x) { return I{} + x; }
    static I iload(const void* p) { return load_as<I>(p); }
    static void istore(void* p, I x) { std::memcpy(p, &x, sizeof x); }
    // The four bytes at p in every lane.
    static I ibroadcast(const void* p) {
        int32_t x;
        std::memcpy(&x, p, sizeof x);
        return iset(x);
    }
    // Sums, differences and products leave out what 32 bits do not hold.
    static I iadd(I a, I b) { return I(U(a) + U(b)); }
    static I isub(I a, I b) { return I(U(a) - U(b)); }
    static I imul(I a, I b) { return I(U(a) * U(b)); }
    static I iand(I a, I b) { return a & b; }
    template <int kBits>
    static I shift_left(I a) {
        return I(U(a) << kBits);
    }
    template <int kBits>
    static I shift_right(I a) {
        return I(U(a) >> kBits);
    }
    // Each 16-bit half of a lane by itself.
    template <int kBits>
    static I shift_right_16(I a) {
        return I(U(a) >> 16 >> kBits << 16 | (U(a) & 0xffffu) >> kBits);
    }
    static int32_t isum(I a) {
        uint32_t total = 0;
        for (int i = 0; i < W; ++i) total += static_cast<uint32_t>(a[i]);
        return static_cast<int32_t>(total);
    }

    static F to_float(I a) { return __builtin_convertvector(a, F); }
    // Half to even; the values must fit.
    static I round(F a) {
        I out;
        for (int i = 0; i < W; ++i) out[i] = static_cast<int32_t>(std::nearbyint(a[i]));
        return out;
    }
    static F as_float(I a) { return F(a); }
    static I as_int(F a) { return I(a); }

    static F load_bf16(const uint16_t* p) { return as_float(shift_left<16>(widen<uint16_t>(p))); }
    static F load_f16(const uint16_t* p) {
        F out;
        for (int i = 0; i < W; ++i) out[i] = f16_to_float(p[i]);
        return out;
    }
    static I load_u8(const uint8_t* p) { return widen<uint8_t>(p); }
    static I load_s8(const int8_t* p) { return widen<int8_t>(p); }
    // Values that fit into 8, or 16, bits.
    static void store_s8(int8_t* p, I a) {
        for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(a[i]);
    }
    // Every four as the first, third, second, fourth: what shifts of whole 16-bit halves take apart.
    static void store_s16_in_pairs(int16_t* p, I a) {
        for (int i = 0; i < W; i += 4) {
            for (int j = 0; j < 4; ++j) p[i + j] = static_cast<int16_t>(a[i + (j == 1 ? 2 : j == 2 ? 1 : j)]);
        }
    }

    // sum + w * a over the two signed 16-bit halves.
    static I dot2(I sum, I w, I a) {
        const I low = I(U(w) << 16) >> 16, high = w >> 16;
        return iadd(sum, iadd(imul(low, I(U(a) << 16) >> 16), imul(high, a >> 16)));
    }
    // sum + w * a over four unsigned and four signed bytes.
    static I dot4(I sum, I w, I a) {
        for (int byte = 0; byte < 4; ++byte) {
            sum = iadd(sum, imul(I(U(w) >> 8 * byte & 255u), I(U(a) << (24 - 8 * byte)) >> 24));
        }
        return sum;
    }
    // Bytes of w are at most 15. Sums of eight such products, then added to sums of 32 bits.
    static I nibble_dot4(I eighths, I w, I a) { return dot4(eighths, w, a); }
    static I add_nibble_sums(I sum, I eighths) { return iadd(sum, eighths); }

   private:
    template <class Vector>
    static Vector load_as(const void* p) {
        Vector out;
        std::memcpy(&out, p, sizeof out);
        return out;
    }
    template <class T>
    static I widen(const T* p) {
        I out;
        for (int i = 0; i < W; ++i) out[i] = p[i];
        return out;
    }
};

}  // namespace
}  // namespace qp
