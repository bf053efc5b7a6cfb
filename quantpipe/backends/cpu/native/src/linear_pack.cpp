#include "linear_pack.h"

#include <algorithm>
#include <cstring>

#include "small_floats.h"

namespace qp {
namespace {

// Integers are summed over stretches of a multiple of this many inputs.
constexpr int kIntegerStep = 32;
constexpr int kMaxGroup = 128;
constexpr float kMaxByte = 127;
// The largest that is a sum of two signed bytes, the higher one times 256.
constexpr float kMaxTwoBytes = 127 * 256 + 127;

int round_up(int value, int step) { return (value + step - 1) / step * step; }

std::unique_ptr<Linear> make(LinearKind kind, int n, int k, int k_step, const float* bias_N) {
    auto linear = std::make_unique<Linear>();
    LinearView& view = linear->view;
    view.kind = kind;
    view.n = n;
    view.k = k;
    view.k_padded = round_up(k, k_step);
    view.num_panels = (n + kPanel - 1) / kPanel;
    view.activation_bits = 32;
    linear->bias = Aligned(size_t(view.num_panels) * kPanel * sizeof(float));
    if (bias_N != nullptr) std::memcpy(linear->bias.as<float>(), bias_N, sizeof(float) * n);
    view.bias = linear->bias.as<float>();
    return linear;
}

void allocate_weights(Linear& linear, size_t bits_each) {
    LinearView& view = linear.view;
    view.panel_bytes = size_t(view.k_padded) * kPanel * bits_each / 8;
    linear.weights = Aligned(view.panel_bytes * view.num_panels);
    view.weights = linear.weights.as<uint8_t>();
}

// Channel n's place in its panel, in units of one 32-bit lane.
template <class T>
T* lane(Linear& linear, int n) {
    uint8_t* panel = linear.weights.as<uint8_t>() + n / kPanel * linear.view.panel_bytes;
    return reinterpret_cast<T*>(panel + n % kPanel * 4);
}

void pack_bytes(Linear& linear, const int8_t* w_NK) {
    const LinearView& view = linear.view;
    for (int n = 0; n < view.n; ++n) {
        uint8_t* out = lane<uint8_t>(linear, n);
        const int8_t* row = w_NK + size_t(n) * view.k;
        for (int k = 0; k < view.k; ++k) out[k / 4 * kPanel * 4 + k % 4] = static_cast<uint8_t>(row[k] + 128);
    }
}

void pack_nibbles(Linear& linear, const int8_t* w_NK) {
    const LinearView& view = linear.view;
    for (int n = 0; n < view.n; ++n) {
        uint8_t* out = lane<uint8_t>(linear, n);
        const int8_t* row = w_NK + size_t(n) * view.k;
        for (int k = 0; k < view.k; ++k) {
            const int code = (row[k] + 8) & 15;
            out[k / 8 * kPanel * 4 + k % 4] |= static_cast<uint8_t>(k % 8 < 4 ? code : code << 4);
        }
    }
}

bool fits_bf16(float value) { return (bits_of_float(value) & 0xffff) == 0; }

// [N, S] to [panels][S][32], in bfloat16 where that loses nothing.
void pack_scales(Linear& linear, const float* scale_NS) {
    LinearView& view = linear.view;
    const size_t count = size_t(view.n) * view.num_scales;
    view.has_bf16_scales = std::all_of(scale_NS, scale_NS + count, fits_bf16);
    linear.scales = Aligned(size_t(view.num_panels) * view.num_scales * kPanel * (view.has_bf16_scales ? 2 : 4));
    for (size_t i = 0; i < count; ++i) {
        const size_t n = i / view.num_scales, s = i % view.num_scales;
        const size_t at = (n / kPanel * view.num_scales + s) * kPanel + n % kPanel;
        if (view.has_bf16_scales) {
            linear.scales.as<uint16_t>()[at] = static_cast<uint16_t>(bits_of_float(scale_NS[i]) >> 16);
        } else {
            linear.scales.as<float>()[at] = scale_NS[i];
        }
    }
    view.scales = linear.scales.as<void>();
}

void pack_zeros(Linear& linear, const int8_t* zero_NS) {
    LinearView& view = linear.view;
    linear.zeros = Aligned(size_t(view.num_panels) * view.num_scales * kPanel);
    for (size_t i = 0; i < size_t(view.n) * view.num_scales; ++i) {
        const size_t n = i / view.num_scales, s = i % view.num_scales;
        const size_t at = (n / kPanel * view.num_scales + s) * kPanel + n % kPanel;
        linear.zeros.as<uint8_t>()[at] = static_cast<uint8_t>(zero_NS[i] + view.center());
    }
    view.zeros = linear.zeros.as<uint8_t>();
}

// Activations are scaled in groups no larger than these, whatever the weights'.
int activation_group(int group) {
    for (int size = kMaxGroup; size > kIntegerStep; size /= 2) {
        if (group % size == 0) return size;
    }
    return kIntegerStep;
}

}  // namespace

std::unique_ptr<Linear> pack_f32(int n, int k, const float* w_NK, const float* bias_N) {
    auto linear = make(LinearKind::f32, n, k, 1, bias_N);
    allocate_weights(*linear, 32);
    for (int row = 0; row < n; ++row) {
        float* out = lane<float>(*linear, row);
        for (int i = 0; i < k; ++i) out[size_t(i) * kPanel] = w_NK[size_t(row) * k + i];
    }
    return linear;
}

std::unique_ptr<Linear> pack_bf16(int n, int k, const uint16_t* w_NK, const float* bias_N) {
    auto linear = make(LinearKind::bf16, n, k, 2, bias_N);
    allocate_weights(*linear, 16);
    for (int row = 0; row < n; ++row) {
        uint16_t* out = lane<uint16_t>(*linear, row);
        for (int i = 0; i < k; ++i) out[size_t(i / 2) * kPanel * 2 + i % 2] = w_NK[size_t(row) * k + i];
    }
    return linear;
}

std::unique_ptr<Linear> pack_w8a8(int n, int k, const int8_t* w_NK, const float* scale_N, const float* bias_N,
                                  float divisor) {
    auto linear = make(LinearKind::w8a8, n, k, kIntegerStep, bias_N);
    LinearView& view = linear->view;
    view.activation_bits = 8;
    view.divisor = divisor;
    view.group = view.k_padded;
    view.groups_per_scale = view.num_scales = 1;
    allocate_weights(*linear, 8);
    pack_bytes(*linear, w_NK);
    pack_scales(*linear, scale_N);
    return linear;
}

std::unique_ptr<Linear> pack_integers(int bits, int n, int k, int group, const int8_t* w_NK, const float* scale_NG,
                                      const int8_t* zero_NG, const float* bias_N, int activation_bits) {
    auto linear = make(bits == 8 ? LinearKind::w8 : LinearKind::w4, n, k, kIntegerStep, bias_N);
    LinearView& view = linear->view;
    view.activation_bits = activation_bits;
    view.divisor = activation_bits == 8 ? kMaxByte : kMaxTwoBytes;
    const int padded_group = group == k ? view.k_padded : group;
    view.group = activation_group(padded_group);
    view.groups_per_scale = padded_group / view.group;
    view.num_scales = view.k_padded / padded_group;
    allocate_weights(*linear, bits == 8 ? 8 : 4);
    bits == 8 ? pack_bytes(*linear, w_NK) : pack_nibbles(*linear, w_NK);
    pack_scales(*linear, scale_NG);
    if (zero_NG != nullptr) pack_zeros(*linear, zero_NG);
    return linear;
}

}  // namespace qp
