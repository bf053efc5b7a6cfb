// The C functions of linear.h: what is wrong with the arguments is said here.
#include <exception>
#include <memory>
#include <string>

#include "linear_pack.h"
#include "qp_error.h"

namespace {

using qp::Linear;

// Sums of this many products of bytes fit into 32 bits.
constexpr int kMaxIntegerK = 131071;
constexpr int kGroupStep = 32;

template <class Make>
void* made(Make make) {
    try {
        return make().release();
    } catch (const std::exception& error) {
        qp::set_error(std::string("packing a linear: ") + error.what() + "; free memory or use fewer bits");
        return nullptr;
    }
}

bool refuse(const std::string& message) {
    qp::set_error(message);
    return false;
}

bool is_shape_legal(int n, int k, int max_k) {
    const std::string where = "linear of " + std::to_string(n) + " x " + std::to_string(k) + ": ";
    if (n < 1 || k < 1) return refuse(where + "both sizes must be at least 1");
    if (k > max_k) return refuse(where + "integers are summed over at most " + std::to_string(max_k) + " inputs");
    return true;
}

bool is_scheme_legal(int bits, int k, int group, int activation_bits) {
    const std::string where = "weight-only linear: ";
    if (bits != 3 && bits != 4 && bits != 8) {
        return refuse(where + std::to_string(bits) + " bits; use 3, 4 or 8");
    }
    if (activation_bits != 8 && activation_bits != 16 && activation_bits != 32) {
        return refuse(where + std::to_string(activation_bits) + "-bit activations; use 8, 16 or 32");
    }
    if (group != k && (group < kGroupStep || group % kGroupStep != 0 || k % group != 0)) {
        return refuse(where + "groups of " + std::to_string(group) + " in " + std::to_string(k) +
                      " inputs; use a multiple of 32 that divides them, or one group");
    }
    return true;
}

}  // namespace

extern "C" {

void* qp_linear_f32(int n, int k, const float* w, const float* bias) {
    if (!is_shape_legal(n, k, 1 << 30)) return nullptr;
    return made([&] { return qp::pack_f32(n, k, w, bias); });
}

void* qp_linear_bf16(int n, int k, const uint16_t* w, const float* bias) {
    if (!is_shape_legal(n, k, 1 << 30)) return nullptr;
    return made([&] { return qp::pack_bf16(n, k, w, bias); });
}

void* qp_linear_w8a8(int n, int k, const int8_t* w, const float* scale_n, const float* bias, float divisor) {
    if (!is_shape_legal(n, k, kMaxIntegerK)) return nullptr;
    if (!(divisor >= 1 && divisor <= 128)) {
        refuse("w8a8 linear: activation divisor " + std::to_string(divisor) + "; use 127 or 127.5");
        return nullptr;
    }
    return made([&] { return qp::pack_w8a8(n, k, w, scale_n, bias, divisor); });
}

void* qp_linear_wint(int bits, int n, int k, int group, const int8_t* w_nk, const float* scale_ng, const int8_t* zero_ng,
                     const float* bias, int activation_bits) {
    if (!is_shape_legal(n, k, 1 << 30) || !is_scheme_legal(bits, k, group, activation_bits)) return nullptr;
    return made([&] { return qp::pack_integers(bits, n, k, group, w_nk, scale_ng, zero_ng, bias, activation_bits); });
}

void qp_linear_free(void* linear) { delete static_cast<Linear*>(linear); }

int64_t qp_linear_bytes(const void* linear) { return static_cast<const Linear*>(linear)->num_bytes(); }

void qp_linear_apply(const void* handle, const float* x, int t, float* y, int num_threads) {
    const Linear& linear = *static_cast<const Linear*>(handle);
    qp::Threads threads(num_threads);
    static thread_local qp::Workspace workspace;
    qp::linear_run(linear, x, linear.view.k, t, y, linear.view.n, workspace, threads);
}
}
