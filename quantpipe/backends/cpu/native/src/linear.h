// y = x @ W^T + bias over packed weights. Knows no layers.
//
// Shapes: T tokens, N out_features, K in_features, G groups along K.
#pragma once

#include <cstddef>
#include <cstdint>

#include "threads.h"
#include "workspace.h"

namespace qp {

enum class LinearKind { f32, bf16, w8a8, w4, w8 };

// Packed weights; owns its memory.
struct Linear;

int linear_num_out(const Linear& linear);
int linear_num_in(const Linear& linear);

// Whether its weights are stored as floats, of which linear_row gives channel n's: x [K].
bool has_rows(const Linear& linear);
void linear_row(const Linear& linear, int n, float* x);

// y [T, ldy], columns 0 to N, from x [T, ldx], columns 0 to K. T may be 0. A row that holds a NaN or an infinity gives
// NaN or infinities in that row and changes no other. What a row becomes does not depend on the rows beside it.
void linear_run(const Linear& linear, const float* x, int ldx, int num_tokens, float* y, int ldy, Workspace& workspace,
                Threads& threads);

}  // namespace qp

// Each returns a handle, or null with the reason in qp_last_error(). Pointers are aligned as their type and not kept; bias
// may be null.
extern "C" {
void* qp_linear_f32(int n, int k, const float* w, const float* bias);
void* qp_linear_bf16(int n, int k, const uint16_t* w, const float* bias);
// Activations become int8 per token: |x| max / divisor, half to even.
void* qp_linear_w8a8(int n, int k, const int8_t* w, const float* scale_n, const float* bias, float activation_divisor);
// bits 3, 4 or 8. A scale for every `group` inputs (group == k: per channel): (q - zero) * scale, zero null: 0.
// activation_bits 8 and 16: integers scaled per token and group; 32: float32.
void* qp_linear_wint(int bits, int n, int k, int group, const int8_t* w_nk, const float* scale_ng,
                     const int8_t* zero_ng, const float* bias, int activation_bits);
void qp_linear_free(void* linear);
int64_t qp_linear_bytes(const void* linear);
void qp_linear_apply(const void* linear, const float* x, int t, float* y, int num_threads);
}
