// Floating point of 16 bits, one value at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace qp {
namespace {

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float bf16_to_float(uint16_t value) { return float_of_bits(static_cast<uint32_t>(value) << 16); }

// IEEE 754 binary16: denormals, infinities and NaNs included.
inline float f16_to_float(uint16_t value) {
    const uint32_t sign = (value & 0x8000u) << 16;
    const uint32_t exponent = value >> 10 & 31, fraction = value & 0x3ff;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent != 0) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

// Rounds half to even; beyond the largest number lies infinity.
inline uint16_t float_to_f16(float value) {
    const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        // Adding 0.5 leaves a multiple of 2^-24 in the lowest bits, rounded by the addition itself.
        const uint32_t sum = bits_of_float(float_of_bits(magnitude) + 0.5f);
        return static_cast<uint16_t>(sign | (sum - bits_of_float(0.5f)));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

}  // namespace
}  // namespace qp
