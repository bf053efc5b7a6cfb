// Writes a token's keys and values into its slot, by the rules of formats/kv_mode.py to the last bit.
//
// Shapes: D head_dim, b tokens of a block.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "small_floats.h"
#include "step_kernels.h"

namespace qp {
namespace {

struct Range {
    float lowest, highest;   // NaN where a value is one
};

template <class S>
Range range_of(const float* x, int size) {
    Range range{x[0], x[0]};
    int i = 0;
    if (size >= S::W) {
        typename S::F low = S::load(x), high = low, zeros = S::zero();
        for (; i + S::W <= size; i += S::W) {
            const typename S::F v = S::load(x + i);
            low = S::min(low, v), high = S::max(high, v);
            zeros = S::fma(v, S::zero(), zeros);
        }
        // A NaN, or an infinity, is looked for value by value.
        if (S::sum(zeros) != 0) i = 0;
        else range = {-S::largest(S::sub(S::zero(), low)), S::largest(high)};
    }
    for (; i < size; ++i) {
        if (std::isnan(x[i])) return {x[i], x[i]};
        if (x[i] < range.lowest) range.lowest = x[i];
        if (x[i] > range.highest) range.highest = x[i];
    }
    return range;
}

// codes = x / divisor - or (x - minimum) / divisor - half to even, within [lowest, highest].
template <class S>
void round_codes(const float* x, int size, float minimum, float divisor, float lowest, float highest, int8_t* codes) {
    int i = 0;
    for (; i + S::W <= size; i += S::W) {
        const typename S::F v = S::div(S::sub(S::load(x + i), S::set(minimum)), S::set(divisor));
        S::store_s8(codes + i, S::round(S::min(S::max(v, S::set(lowest)), S::set(highest))));
    }
    for (; i < size; ++i) {
        const float v = (x[i] - minimum) / divisor;
        codes[i] = static_cast<int8_t>(std::nearbyint(v < lowest ? lowest : v > highest ? highest : v));
    }
}

// Where one token's codes and parameters go: code c at codes + c * stride, parameters of a block at `parameters`.
struct Slot {
    uint8_t* codes;
    int64_t stride;
    uint8_t* parameters;
    int block_size, offset;

    void put(const int8_t* from, int count) const {
        if (stride == 1) {
            std::memcpy(codes, from, count);
            return;
        }
        for (int c = 0; c < count; ++c) codes[c * stride] = static_cast<uint8_t>(from[c]);
    }
};

template <class S>
void write_int8(const float* x, int size, const Slot& slot) {
    int8_t codes[kMaxHeadDim];
    const Range range = range_of<S>(x, size);
    const float low = std::fabs(range.lowest), high = std::fabs(range.highest), absmax = low > high ? low : high;
    const float scale = (absmax == 0 ? 1.0f : absmax) / 127.0f;
    // Zeros make every product with a scale that is not finite NaN.
    if (std::isfinite(scale)) round_codes<S>(x, size, 0.0f, scale, -128.0f, 127.0f, codes);
    else std::memset(codes, 0, size);
    slot.put(codes, size);
    std::memcpy(slot.parameters + 4 * slot.offset, &scale, 4);
}

// Whether a value was not finite.
template <class S>
bool write_int8_static(const float* x, int size, float scale, const Slot& slot) {
    int8_t codes[kMaxHeadDim];
    round_codes<S>(x, size, 0.0f, scale, -127.0f, 127.0f, codes);
    const Range range = range_of<S>(x, size);
    const bool is_finite = std::isfinite(range.lowest) && std::isfinite(range.highest);
    if (!is_finite) {
        for (int i = 0; i < size; ++i) codes[i] = std::isfinite(x[i]) ? codes[i] : kNotFiniteCode;
    }
    slot.put(codes, size);
    return !is_finite;
}

template <class S>
void write_int4(const float* x, int size, const Slot& slot) {
    int8_t codes[kMaxHeadDim];
    const Range range = range_of<S>(x, size);
    const uint16_t minimum = float_to_f16(range.lowest);
    const uint16_t scale = float_to_f16((range.highest - f16_to_float(minimum)) / 15.0f);
    const float divisor = f16_to_float(scale);
    if (std::isfinite(divisor)) {
        round_codes<S>(x, size, f16_to_float(minimum), divisor == 0 ? 1.0f : divisor, 0.0f, 15.0f, codes);
    } else {
        std::memset(codes, 0, size);
    }
    for (int c = 0; c < size / 2; ++c) codes[c] = static_cast<int8_t>(codes[c] | codes[c + size / 2] << 4);
    slot.put(codes, size / 2);
    std::memcpy(slot.parameters + 2 * slot.offset, &scale, 2);
    std::memcpy(slot.parameters + 2 * (slot.block_size + slot.offset), &minimum, 2);
}

// Whether kNotFiniteCode was written.
template <class S>
bool write_codes(int kind, const float* x, int size, float scale, const Slot& slot) {
    if (kind == QP_KV_INT8_STATIC) return write_int8_static<S>(x, size, scale, slot);
    if (kind == QP_KV_INT8) write_int8<S>(x, size, slot);
    if (kind == QP_KV_INT4) write_int4<S>(x, size, slot);
    for (int d = 0; kind == QP_KV_F32 && d < size; ++d) std::memcpy(slot.codes + d * 4 * slot.stride, x + d, 4);
    return false;
}

template <class S>
bool write_key_value(const KVLayout& layout, uint8_t* head, int offset, const float* key, const float* value,
                     float key_scale, float value_scale) {
    const int size = layout.head_dim, b = layout.block_size;
    const int64_t key_bytes = layout.key_kind == QP_KV_F32 ? 4 : 1;
    const int64_t value_bytes = KVLayout::code_bytes(layout.value_kind, size);
    const bool key_marked = write_codes<S>(layout.key_kind, key, size, key_scale,
                                           {head + offset * key_bytes, b, head + layout.key_parameters, b, offset});
    const bool value_marked =
        write_codes<S>(layout.value_kind, value, size, value_scale,
                       {head + layout.values + offset * value_bytes, 1, head + layout.value_parameters, b, offset});
    return key_marked || value_marked;
}

}  // namespace
}  // namespace qp
