// Makes packed linears out of dense matrices. Layouts: see linear_kernels.h.
//
// Shapes: N out_features, K in_features, G groups along K.
#pragma once

#include <memory>

#include "packed_linear.h"

namespace qp {

std::unique_ptr<Linear> pack_f32(int n, int k, const float* w_NK, const float* bias_N);
std::unique_ptr<Linear> pack_bf16(int n, int k, const uint16_t* w_NK, const float* bias_N);
std::unique_ptr<Linear> pack_w8a8(int n, int k, const int8_t* w_NK, const float* scale_N, const float* bias_N,
                                  float divisor);
// group: K, or a multiple of 32 that divides it. zero_NG null: all zero. Bits 4 or 8; activation bits 8, 16 or 32.
std::unique_ptr<Linear> pack_integers(int bits, int n, int k, int group, const int8_t* w_NK, const float* scale_NG,
                                      const int8_t* zero_NG, const float* bias_N, int activation_bits);

}  // namespace qp
