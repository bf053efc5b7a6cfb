#include "linear.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "qp_error.h"

namespace qp {

struct Linear {
    int n, k;
    std::vector<float> w, bias;
    float divisor = 0;
};

int linear_num_out(const Linear& linear) { return linear.n; }
int linear_num_in(const Linear& linear) { return linear.k; }

void linear_run(const Linear& l, const float* x, int ldx, int num_tokens, float* y, int ldy, Workspace&, Threads& threads) {
    threads.parallel_for(num_tokens, [&](int t, int) {
        std::vector<float> row(x + size_t(t) * ldx, x + size_t(t) * ldx + l.k);
        float scale = 1;
        if (l.divisor != 0) {
            float top = 0;
            for (float v : row) top = std::fabs(v) > top || std::isnan(v) ? std::fabs(v) : top;
            scale = (top == 0 ? 1 : top) / l.divisor;
            for (float& v : row) v = std::fmin(127.f, std::fmax(-128.f, std::nearbyint(v / scale)));
        }
        for (int n = 0; n < l.n; ++n) {
            float sum = 0;
            for (int k = 0; k < l.k; ++k) sum += row[k] * l.w[size_t(n) * l.k + k];
            y[size_t(t) * ldy + n] = sum * scale + (l.bias.empty() ? 0 : l.bias[n]);
        }
    });
}

static Linear* fresh(int n, int k, const float* bias) {
    auto* l = new Linear{n, k, std::vector<float>(size_t(n) * k), {}};
    if (bias) l->bias.assign(bias, bias + n);
    return l;
}

}  // namespace qp

extern "C" {
void* qp_linear_f32(int n, int k, const float* w, const float* bias) {
    qp::Linear* l = qp::fresh(n, k, bias);
    std::memcpy(l->w.data(), w, l->w.size() * sizeof(float));
    return l;
}
void* qp_linear_bf16(int n, int k, const uint16_t* w, const float* bias) {
    qp::Linear* l = qp::fresh(n, k, bias);
    for (size_t i = 0; i < l->w.size(); ++i) {
        const uint32_t bits = uint32_t(w[i]) << 16;
        std::memcpy(&l->w[i], &bits, 4);
    }
    return l;
}
void* qp_linear_w8a8(int n, int k, const int8_t* w, const float* scale_n, const float* bias, float divisor) {
    qp::Linear* l = qp::fresh(n, k, bias);
    for (size_t i = 0; i < l->w.size(); ++i) l->w[i] = w[i] * scale_n[i / k];
    l->divisor = divisor;
    return l;
}
void* qp_linear_wint(int, int n, int k, int group, const int8_t* w, const float* scale, const int8_t* zero,
                     const float* bias, int) {
    qp::Linear* l = qp::fresh(n, k, bias);
    for (size_t i = 0; i < l->w.size(); ++i) {
        const size_t g = i / k * (k / group) + i % k / group;
        l->w[i] = (w[i] - (zero ? zero[g] : 0)) * scale[g];
    }
    return l;
}
void qp_linear_free(void* linear) { delete static_cast<qp::Linear*>(linear); }
int64_t qp_linear_bytes(const void* linear) {
    return static_cast<const qp::Linear*>(linear)->w.size() * 4;
}
void qp_linear_apply(const void* linear, const float* x, int t, float* y, int num_threads) {
    const auto& l = *static_cast<const qp::Linear*>(linear);
    qp::Threads threads(num_threads);
    qp::Workspace workspace;
    qp::linear_run(l, x, l.k, t, y, l.n, workspace, threads);
}
}
