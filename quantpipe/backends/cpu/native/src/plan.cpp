// The C functions of a plan.
#include "plan.h"

#include <exception>
#include <string>

#include "forward.h"
#include "isa.h"
#include "plan_check.h"
#include "plan_parts.h"
#include "qp_error.h"

namespace qp {
namespace {

const Linear* linear_of(const void* linear) { return static_cast<const Linear*>(linear); }

int kind_of(const Plan& plan, const qp_layer& given) {
    int kind = 0;
    while (kind < static_cast<int>(plan.kinds.size()) && !plan.kinds[kind].equals(given)) ++kind;
    return kind;
}

void add_layer(Plan& plan, Layer&& layer) {
    const qp_layer& sizes = layer.sizes;
    if (layer.kind == static_cast<int>(plan.kinds.size())) {
        plan.kinds.emplace_back();
        LayerKind& kind = plan.kinds.back();
        kind.num_heads = sizes.num_heads, kind.num_kv_heads = sizes.num_kv_heads, kind.head_dim = sizes.head_dim;
        kind.rope = sizes.rope, kind.window = sizes.window;
    }
    plan.layers.push_back(std::move(layer));
}

Layer layer_of(const Plan& plan, const qp_layer& given) {
    const int hidden = plan.shape.hidden_size, dim = given.head_dim;
    return Layer{given,
                 kind_of(plan, given),
                 Norm::of(given.attention_norm, hidden),
                 Norm::of(given.query_norm, dim),
                 Norm::of(given.key_norm, dim),
                 Norm::of(given.post_attention_norm, hidden),
                 Norm::of(given.mlp_norm, hidden),
                 Norm::of(given.post_mlp_norm, hidden),
                 linear_of(given.query),
                 linear_of(given.key),
                 linear_of(given.value),
                 linear_of(given.output),
                 linear_of(given.gate),
                 linear_of(given.up),
                 linear_of(given.down)};
}

// Runs fn, and says of an exception what it is.
template <class Fn>
bool succeeds(const char* where, Fn&& fn) {
    try {
        const std::string wrong = fn();
        if (wrong.empty()) return true;
        set_error(std::string(where) + ": " + wrong);
    } catch (const std::exception& error) {
        set_error(std::string(where) + ": " + error.what());
    }
    return false;
}

}  // namespace

Plan::Plan(const qp_shape& given)
    : shape(given),
      final_norm(Norm::of(given.final_norm, given.hidden_size)),
      head(linear_of(given.head)),
      kernels(isa().step),
      threads(given.num_threads) {
    shape.final_norm.weight = nullptr;
    buffers.attention.resize(threads.size());
}

int64_t StepBuffers::num_bytes() const {
    int64_t total = 0;
    for (const Aligned* one : {&hidden, &normed, &part, &qkv, &attended, &sink_query, &gate_up,
                               &head_input, &partial}) {
        total += one->size();
    }
    for (const Aligned& one : attention) total += one.size();
    return total + search.num_bytes();
}

}  // namespace qp

extern "C" {

void* qp_plan_new(const qp_shape* shape) {
    qp::Plan* plan = nullptr;
    qp::succeeds("plan", [&]() -> std::string {
        if (shape->hidden_size < 1 || shape->vocab_size < 1) return "hidden_size, vocab_size: below 1";
        if (shape->num_threads < 1) return "num_threads: below 1";
        if (!shape->final_norm.weight) return "final_norm: it is needed";
        if (shape->embedding_dtype < QP_F32 || shape->embedding_dtype > QP_F16) return "embedding_dtype: not known";
        const std::string wrong =
            qp::wrong_linear("head", qp::linear_of(shape->head), shape->vocab_size, shape->hidden_size);
        if (wrong.empty() && !shape->embedding && !qp::has_rows(*qp::linear_of(shape->head))) {
            return "embedding: it is needed where the head holds integers";
        }
        if (wrong.empty()) plan = new qp::Plan(*shape);
        return wrong;
    });
    return plan;
}

void qp_plan_free(void* plan) { delete static_cast<qp::Plan*>(plan); }

int32_t qp_plan_add_rope(void* handle, int32_t num_pairs, const double* inverse_frequencies, float attention_scale) {
    auto& plan = *static_cast<qp::Plan*>(handle);
    const bool done = qp::succeeds("rope", [&]() -> std::string {
        if (num_pairs < 0) return "num_pairs: below 0";
        plan.ropes.push_back(std::make_unique<qp::RopeTable>(num_pairs, inverse_frequencies, attention_scale));
        return {};
    });
    return done ? static_cast<int32_t>(plan.ropes.size()) - 1 : -1;
}

int32_t qp_plan_add_layer(void* handle, const qp_layer* given) {
    auto& plan = *static_cast<qp::Plan*>(handle);
    const std::string where = "layer " + std::to_string(plan.layers.size());
    const bool done = qp::succeeds(where.c_str(), [&]() -> std::string {
        std::string wrong = qp::wrong_sizes(plan, *given);
        if (!wrong.empty()) return wrong;
        qp::Layer layer = qp::layer_of(plan, *given);
        wrong = qp::wrong_linears(plan, layer);
        if (wrong.empty()) qp::add_layer(plan, std::move(layer));
        return wrong;
    });
    return done ? 0 : -1;
}

int32_t qp_plan_forward(void* handle, const qp_batch* batch, const qp_kv* kv, float* logits, int32_t* argmax) {
    auto& plan = *static_cast<qp::Plan*>(handle);
    const bool done = qp::succeeds("step", [&]() -> std::string {
        std::string wrong = qp::wrong_step(plan, *batch, *kv);
        if (!wrong.empty()) return wrong;
        qp::Step step{plan, *batch, *kv};
        qp::forward(step, logits, argmax);
        return {};
    });
    return done ? 0 : -1;
}

void qp_plan_times(const void* plan, double* seconds) {
    const auto& watch = static_cast<const qp::Plan*>(plan)->watch;
    for (int part = 0; part < QP_NUM_TIMES; ++part) seconds[part] = watch.seconds[part];
}

int64_t qp_plan_bytes(const void* handle) {
    const auto& plan = *static_cast<const qp::Plan*>(handle);
    int64_t total = plan.buffers.num_bytes();
    for (const auto& rope : plan.ropes) total += rope->num_bytes();
    for (const auto& kind : plan.kinds) total += kind.turns.num_bytes() + kind.sink_turns.num_bytes();
    for (const auto& layer : plan.layers) {
        for (const qp::Norm* norm : {&layer.attention_norm, &layer.query_norm, &layer.key_norm,
                                     &layer.post_attention_norm, &layer.mlp_norm, &layer.post_mlp_norm}) {
            total += 4 * norm->size();
        }
    }
    return total + 4 * plan.final_norm.size();
}

int32_t qp_attention_apply(const qp_layer* given, int32_t num_pairs, const double* inverse_frequencies,
                           float attention_scale, const qp_batch* batch, const qp_kv* kv, const float* qkv,
                           float* attended, int32_t num_threads) {
    const bool done = qp::succeeds("attention", [&]() -> std::string {
        qp_shape shape{};
        shape.num_threads = num_threads;
        shape.vocab_size = INT32_MAX;
        qp::Plan plan(shape);
        plan.ropes.push_back(std::make_unique<qp::RopeTable>(num_pairs, inverse_frequencies, attention_scale));
        std::string wrong = qp::wrong_sizes(plan, *given);
        if (wrong.empty()) qp::add_layer(plan, qp::layer_of(plan, *given));
        if (wrong.empty()) wrong = qp::wrong_step(plan, *batch, *kv);
        if (!wrong.empty()) return wrong;
        plan.has_written_not_finite = true;   // the cache comes from elsewhere
        qp::Step step{plan, *batch, *kv};
        qp::attention_part(step, qkv, attended);
        return {};
    });
    return done ? 0 : -1;
}

void qp_gate_apply(int32_t activation, float* gate, const float* up, int32_t size) {
    qp::isa().step.gate(activation, gate, up, size, 1, size);
}

int64_t qp_argmax_apply(const float* x, int64_t size) { return qp::isa().step.argmax(x, size); }

int64_t qp_kv_block_bytes(int32_t num_kv_heads, int32_t head_dim, int32_t block_size, int32_t key_kind,
                          int32_t value_kind) {
    int64_t found = -1;
    qp::succeeds("kv", [&]() -> std::string {
        if (num_kv_heads < 1 || head_dim < 8 || head_dim % 8 || block_size < 1) return "head_dim: not a multiple of 8";
        if (!qp::is_kind(key_kind) || !qp::is_kind(value_kind)) return "unknown kind";
        found = qp::KVLayout::of(num_kv_heads, head_dim, block_size, key_kind, value_kind).block_bytes;
        return {};
    });
    return found;
}

int32_t qp_kv_tile(void) { return qp::kTile; }

}  // extern "C"
