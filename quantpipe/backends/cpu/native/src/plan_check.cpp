// Refuses layers that do not fit together, and steps that would read or write outside of what was given.
#include "plan_check.h"

#include <string>

namespace qp {
namespace {

std::string shape_of(int num_out, int num_in) {
    return "[" + std::to_string(num_out) + ", " + std::to_string(num_in) + "]";
}

}  // namespace

// Empty where the linear is as described.
std::string wrong_linear(const char* name, const Linear* linear, int num_out, int num_in) {
    if (linear == nullptr) return std::string(name) + ": no linear; give one of " + shape_of(num_out, num_in);
    const int found_out = linear_num_out(*linear), found_in = linear_num_in(*linear);
    if (found_out == num_out && found_in == num_in) return {};
    return std::string(name) + ": " + shape_of(found_out, found_in) + "; expected " + shape_of(num_out, num_in);
}

std::string wrong_sizes(const Plan& plan, const qp_layer& sizes) {
    if (sizes.head_dim < 8 || sizes.head_dim % 8 || sizes.head_dim > kMaxHeadDim) {
        return "head_dim: " + std::to_string(sizes.head_dim) + " is not a multiple of 8 up to 1024";
    }
    if (sizes.num_kv_heads < 1 || sizes.num_heads < 1 || sizes.num_heads % sizes.num_kv_heads) {
        return "num_heads: not a multiple of num_kv_heads";
    }
    if (sizes.rope < 0 || sizes.rope >= static_cast<int>(plan.ropes.size())) return "rope: no such rope";
    if (plan.ropes[sizes.rope]->num_pairs() * 2 > sizes.head_dim) return "rope: turns more than head_dim";
    if (sizes.window < 0) return "window: below 0";
    if (sizes.activation != QP_SILU && sizes.activation != QP_GELU_TANH) return "activation: not known";
    if ((sizes.key == nullptr) != (sizes.value == nullptr)) return "key, value: one without the other";
    return {};
}

std::string wrong_linears(const Plan& plan, const Layer& layer) {
    const int hidden = plan.shape.hidden_size, inner = layer.sizes.intermediate_size;
    const int query = layer.query_width(), key = layer.key_width();
    if (!layer.attention_norm || !layer.mlp_norm) return "attention_norm, mlp_norm: both are needed";
    std::string wrong = wrong_linear("query", layer.query, layer.key ? query : layer.qkv_width(), hidden);
    if (wrong.empty() && layer.key) wrong = wrong_linear("key", layer.key, key, hidden);
    if (wrong.empty() && layer.value) wrong = wrong_linear("value", layer.value, key, hidden);
    if (wrong.empty()) wrong = wrong_linear("output", layer.output, hidden, query);
    if (wrong.empty()) wrong = wrong_linear("gate", layer.gate, layer.up ? inner : 2 * inner, hidden);
    if (wrong.empty() && layer.up) wrong = wrong_linear("up", layer.up, inner, hidden);
    if (wrong.empty()) wrong = wrong_linear("down", layer.down, hidden, inner);
    return wrong;
}

bool is_kind(int kind) { return kind >= QP_KV_F32 && kind <= QP_KV_INT4; }

namespace {

std::string wrong_kv(const qp_kv& kv) {
    if (kv.block_size < 1 || kv.num_blocks < 0) return "kv: block_size below 1 or num_blocks below 0";
    if (!is_kind(kv.key_kind) || !is_kind(kv.value_kind)) return "kv: unknown kind";
    if (kv.key_kind == QP_KV_INT8_STATIC && !kv.key_scales) return "kv: static keys without key_scales";
    if (kv.value_kind == QP_KV_INT8_STATIC && !kv.value_scales) return "kv: static values without value_scales";
    return {};
}

std::string wrong_tokens(const qp_shape& shape, const qp_batch& batch, const qp_kv& kv) {
    constexpr int64_t kMaxPosition = 1 << 28;
    const int64_t num_slots = static_cast<int64_t>(kv.num_blocks) * kv.block_size;
    for (int t = 0; t < batch.num_tokens; ++t) {
        const std::string where = "token " + std::to_string(t) + ": ";
        const int64_t id = batch.token_ids[t], position = batch.positions[t], slot = batch.slots[t];
        if (id < 0 || id >= shape.vocab_size) return where + "id " + std::to_string(id) + " is outside the vocabulary";
        if (position < 0 || position > kMaxPosition) return where + "position " + std::to_string(position);
        if (slot < 0 || slot >= num_slots) return where + "slot " + std::to_string(slot) + " is outside the cache";
    }
    for (int r = 0; r < batch.num_rows; ++r) {
        const int64_t row = batch.logit_rows[r];
        if (row < 0 || row >= batch.num_tokens) return "logit row " + std::to_string(row) + " is outside the step";
    }
    return {};
}

std::string wrong_sequences(const qp_batch& batch, const qp_kv& kv) {
    int64_t num_tokens = 0;
    for (int64_t s = 0; s < batch.num_sequences; ++s) {
        const std::string where = "sequence " + std::to_string(s) + ": ";
        const int64_t query_len = batch.query_lens[s];
        const int64_t dropped = batch.dropped_blocks ? batch.dropped_blocks[s] : 0;
        const int64_t context_len = batch.context_lens[s] - dropped * kv.block_size;   // what is held of it
        if (query_len < 0 || dropped < 0 || query_len > context_len) return where + "more new tokens than context";
        if (context_len > static_cast<int64_t>(batch.table_width) * kv.block_size) return where + "table too short";
        num_tokens += query_len;
        if (query_len == 0) continue;
        for (int64_t i = 0; i * kv.block_size < context_len; ++i) {
            const int64_t block = batch.block_table[s * batch.table_width + i];
            if (block < 0 || block >= kv.num_blocks) return where + "block " + std::to_string(block);
        }
    }
    return num_tokens == batch.num_tokens ? "" : "query_lens: do not add up to num_tokens";
}

}  // namespace

std::string wrong_step(const Plan& plan, const qp_batch& batch, const qp_kv& kv) {
    if (plan.layers.empty()) return "plan: no layers";
    if (batch.num_tokens < 0 || batch.num_sequences < 0 || batch.num_rows < 0 || batch.table_width < 0 ||
        batch.num_sinks < 0 || batch.window < 0) {
        return "batch: a count is below 0";
    }
    std::string wrong = wrong_kv(kv);
    if (wrong.empty()) wrong = wrong_tokens(plan.shape, batch, kv);
    if (wrong.empty()) wrong = wrong_sequences(batch, kv);
    return wrong;
}

}  // namespace qp
