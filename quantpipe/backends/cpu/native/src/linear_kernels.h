// The arithmetic of linears as functions of one instruction set, and what these are given. Knows no threads.
//
// Weights lie in panels of 32 output channels; a panel is one run of memory, the same for every instruction set:
//   f32   [K][32] float32           bf16  [K / 2][32][2]
//   8 bit [K / 4][32][4] q + 128    4 bit [K / 8][32][4] q + 8, inputs 0 to 3 in the low halves, 4 to 7 in the high
// Scales and zero points (as codes: zero + 128, zero + 8) of a panel: [S][32].
//
// Shapes: T tokens, N out_features, K in_features, S weight scales along K.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace qp {

constexpr int kPanel = 32;
// Tokens whose activations and sums stay in the caches while a panel is used.
constexpr int kTokenBlock = 120;
// Inputs that a block of expanded weights holds: they and some rows of activations fit into the first-level cache.
constexpr int kIntegerBlockK = 512;
// Also where float32 sums are put down and begun anew, which keeps rounding errors small.
constexpr int kFloatBlockK = 256;

// How a kernel reads activations.
enum class ActivationForm {
    floats,  // float32
    bytes,   // int8
    pairs,   // int16, of every four inputs the first, third, second, fourth
};

struct LinearView {
    LinearKind kind;
    int n, k;
    int k_padded;         // what weights and prepared activations are filled up to, with zeros
    int num_panels;
    int activation_bits;  // 8, 16 or 32
    float divisor;        // of the largest activation of a group: its scale
    int group;            // inputs whose integer products are summed before they are scaled
    int groups_per_scale; // how many of these share a weight scale
    int num_scales;       // S
    const uint8_t* weights;
    size_t panel_bytes;
    const void* scales;   // bfloat16 or float32
    bool has_bf16_scales;
    const uint8_t* zeros; // null where every code is the same
    const float* bias;    // [num_panels * 32]

    bool is_integer() const { return kind != LinearKind::f32 && kind != LinearKind::bf16; }
    bool is_nibbles() const { return kind == LinearKind::w4; }
    int center() const { return is_nibbles() ? 8 : 128; }
    int num_groups() const { return k_padded / group; }
};

struct Activations {
    ActivationForm form;
    uint8_t* x;           // [T] rows, each row_bytes long
    size_t row_bytes;
    float* scales;        // [T, num_groups]
    // Codes are unsigned. What they exceed the weights by, times the sum of a group's activations, is where the sums of
    // products begin: [T, num_groups], or that before it is multiplied by the zero points where there are some.
    int32_t* starts;
};

struct LinearKernels {
    bool has_byte_dot;    // whether any bytes can be multiplied, or only those of 4 bits
    // Tokens [begin, end) of x as the kernel reads them. scratch: floats, k_padded of them.
    void (*prepare)(const LinearView&, const float* x, int64_t ldx, int begin, int end, const Activations&,
                    float* scratch);
    // Columns of panels [first_panel, end_panel) of y, tokens [begin, end). scratch: kScratchBytes.
    void (*run)(const LinearView&, const Activations&, int first_panel, int end_panel, int begin, int end, float* y,
                int64_t ldy, uint8_t* scratch);
};

constexpr size_t kSumBytes = size_t{kTokenBlock} * kPanel * 4;
constexpr size_t kExpandedBytes = size_t{kFloatBlockK} * kPanel * 4;
constexpr size_t kScratchBytes = 2 * kSumBytes + kExpandedBytes;

inline ActivationForm activation_form(const LinearView& view, const LinearKernels& kernels) {
    if (!view.is_integer() || view.activation_bits == 32) return ActivationForm::floats;
    const bool fits_bytes = view.activation_bits == 8 && (view.is_nibbles() || kernels.has_byte_dot);
    return fits_bytes ? ActivationForm::bytes : ActivationForm::pairs;
}

}  // namespace qp
