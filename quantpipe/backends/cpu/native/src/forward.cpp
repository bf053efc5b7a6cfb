// A step: embedding, layers, head.
//
// Shapes: T tokens, H hidden_size, I intermediate size, R rows whose logits are wanted, V vocabulary.
#include "forward.h"

#include <algorithm>
#include <cstring>

#include "small_floats.h"

namespace qp {
namespace {

constexpr int64_t kGateWork = 16;   // an exponential beside a product

void embed_token(const Plan& plan, int64_t token, float* x) {
    const qp_shape& shape = plan.shape;
    if (!shape.embedding) {
        linear_row(*plan.head, static_cast<int>(token), x);
        for (int i = 0; i < shape.hidden_size; ++i) x[i] *= shape.embedding_scale;
        return;
    }
    const int64_t first = token * shape.hidden_size;
    const auto* halves = static_cast<const uint16_t*>(shape.embedding) + first;
    const auto* bytes = static_cast<const uint8_t*>(shape.embedding) + first * 4;
    for (int i = 0; i < shape.hidden_size; ++i) {
        float value;
        if (shape.embedding_dtype == QP_F32) std::memcpy(&value, bytes + 4 * i, 4);
        else value = shape.embedding_dtype == QP_BF16 ? bf16_to_float(halves[i]) : f16_to_float(halves[i]);
        x[i] = value * shape.embedding_scale;
    }
}

void embed(Step& step) {
    Plan& plan = step.plan;
    const int size = plan.shape.hidden_size;
    float* hidden = plan.buffers.hidden.as<float>();
    for_rows(plan.threads, step.batch.num_tokens, size, [&](int first, int end) {
        for (int t = first; t < end; ++t) {
            embed_token(plan, step.batch.token_ids[t], hidden + static_cast<int64_t>(t) * size);
        }
    });
}

void norm_rows(Plan& plan, const Norm& norm, const float* x, int num_rows, float* out) {
    const int size = norm.size();
    for_rows(plan.threads, num_rows, 2 * size, [&](int first, int end) {
        const int64_t start = static_cast<int64_t>(first) * size;
        plan.kernels.norm(x + start, size, end - first, size, norm.weight.data(), norm.eps, out + start, size);
    });
}

// hidden += norm(part), where there is a norm; then normed = next(hidden), where there is a next.
void add_and_norm(Step& step, const Norm& norm, const Norm* next) {
    Plan& plan = step.plan;
    const int size = plan.shape.hidden_size;
    float *hidden = plan.buffers.hidden.as<float>(), *part = plan.buffers.part.as<float>();
    float* normed = plan.buffers.normed.as<float>();
    for_rows(plan.threads, step.batch.num_tokens, 4 * size, [&](int first, int end) {
        for (int64_t t = first; t < end; ++t) {
            float *x = hidden + t * size, *y = part + t * size;
            if (norm) plan.kernels.norm(y, size, 1, size, norm.weight.data(), norm.eps, y, size);
            plan.kernels.add(x, y, size);
            if (next) plan.kernels.norm(x, size, 1, size, next->weight.data(), next->eps, normed + t * size, size);
        }
    });
}

void run_linear(Step& step, const Linear* linear, const float* x, int ldx, float* y, int ldy) {
    linear_run(*linear, x, ldx, step.batch.num_tokens, y, ldy, step.plan.workspace, step.plan.threads);
}

void project_heads(Step& step, const Layer& layer) {
    const float* normed = step.plan.buffers.normed.as<float>();
    float* qkv = step.plan.buffers.qkv.as<float>();
    const int size = step.plan.shape.hidden_size, width = layer.qkv_width(), key = layer.query_width();
    run_linear(step, layer.query, normed, size, qkv, width);
    if (layer.key) run_linear(step, layer.key, normed, size, qkv + key, width);
    if (layer.value) run_linear(step, layer.value, normed, size, qkv + key + layer.key_width(), width);
}

void run_mlp(Step& step, const Layer& layer) {
    Plan& plan = step.plan;
    const int size = plan.shape.hidden_size, inner = layer.sizes.intermediate_size;
    float *normed = plan.buffers.normed.as<float>(), *gate = plan.buffers.gate_up.as<float>();
    run_linear(step, layer.gate, normed, size, gate, 2 * inner);
    if (layer.up) run_linear(step, layer.up, normed, size, gate + inner, 2 * inner);
    plan.watch.mark(QP_TIME_GATE_UP);
    for_rows(plan.threads, step.batch.num_tokens, inner * kGateWork, [&](int first, int end) {
        float* row = gate + static_cast<int64_t>(first) * 2 * inner;
        plan.kernels.gate(layer.sizes.activation, row, row + inner, 2 * inner, end - first, inner);
    });
    plan.watch.mark(QP_TIME_ACTIVATION);
    run_linear(step, layer.down, gate, 2 * inner, plan.buffers.part.as<float>(), size);
    plan.watch.mark(QP_TIME_DOWN);
}

void run_layer(Step& step, int index) {
    Plan& plan = step.plan;
    const Layer& layer = plan.layers[index];
    project_heads(step, layer);
    plan.watch.mark(QP_TIME_QKV);
    place_heads(step, index);
    plan.watch.mark(QP_TIME_ROPE_KV);
    attend(step, index);
    plan.watch.mark(QP_TIME_ATTENTION);
    run_linear(step, layer.output, plan.buffers.attended.as<float>(), layer.query_width(),
               plan.buffers.part.as<float>(), plan.shape.hidden_size);
    plan.watch.mark(QP_TIME_OUTPUT);
    add_and_norm(step, layer.post_attention_norm, &layer.mlp_norm);
    plan.watch.mark(QP_TIME_NORM);
    run_mlp(step, layer);
    const bool is_last = index + 1 == static_cast<int>(plan.layers.size());
    add_and_norm(step, layer.post_mlp_norm, is_last ? nullptr : &plan.layers[index + 1].attention_norm);
    plan.watch.mark(QP_TIME_NORM);
}

void run_head(Step& step, float* logits, int32_t* argmax) {
    Plan& plan = step.plan;
    const int size = plan.shape.hidden_size, num_rows = step.batch.num_rows;
    const int64_t vocab = plan.shape.vocab_size;
    float *hidden = plan.buffers.hidden.as<float>(), *wanted = plan.buffers.head_input.as<float>();
    for (int64_t r = 0; r < num_rows; ++r) {
        std::copy_n(hidden + step.batch.logit_rows[r] * size, size, wanted + r * size);
    }
    norm_rows(plan, plan.final_norm, wanted, num_rows, wanted);
    if (logits) {
        linear_run(*plan.head, wanted, size, num_rows, logits, plan.shape.vocab_size, plan.workspace, plan.threads);
    }
    if (!argmax) return;
    if (!logits) {
        plan.buffers.search.run(*plan.head, wanted, size, num_rows, argmax, plan.workspace, plan.threads);
        return;
    }
    for_rows(plan.threads, num_rows, vocab, [&](int first, int end) {
        for (int64_t r = first; r < end; ++r) {
            argmax[r] = static_cast<int32_t>(plan.kernels.argmax(logits + r * vocab, vocab));
        }
    });
}

void grow_buffers(Step& step) {
    StepBuffers& buffers = step.plan.buffers;
    const int64_t num_tokens = step.batch.num_tokens, size = step.plan.shape.hidden_size;
    for (Aligned* rows : {&buffers.hidden, &buffers.normed, &buffers.part}) rows->grow(num_tokens * size * 4);
    buffers.head_input.grow(step.batch.num_rows * size * 4);
    for (const Layer& layer : step.plan.layers) {
        buffers.qkv.grow(num_tokens * layer.qkv_width() * 4);
        buffers.attended.grow(num_tokens * layer.query_width() * 4);
        buffers.gate_up.grow(num_tokens * 2 * layer.sizes.intermediate_size * 4);
    }
}

}  // namespace

void attention_part(Step& step, const float* qkv, float* attended) {
    Plan& plan = step.plan;
    grow_buffers(step);
    prepare_kinds(step);
    const int64_t num_tokens = step.batch.num_tokens;
    std::copy_n(qkv, num_tokens * plan.layers[0].qkv_width(), plan.buffers.qkv.as<float>());
    place_heads(step, 0);
    attend(step, 0);
    std::copy_n(plan.buffers.attended.as<float>(), num_tokens * plan.layers[0].query_width(), attended);
}

void forward(Step& step, float* logits, int32_t* argmax) {
    Plan& plan = step.plan;
    plan.watch.start();
    grow_buffers(step);
    prepare_kinds(step);
    embed(step);
    plan.watch.mark(QP_TIME_EMBEDDING);
    if (step.batch.num_tokens > 0) {
        norm_rows(plan, plan.layers[0].attention_norm, plan.buffers.hidden.as<float>(), step.batch.num_tokens,
                  plan.buffers.normed.as<float>());
        plan.watch.mark(QP_TIME_NORM);
        for (int index = 0; index < static_cast<int>(plan.layers.size()); ++index) run_layer(step, index);
    }
    if (logits || argmax) run_head(step, logits, argmax);
    plan.watch.mark(QP_TIME_HEAD);
}

}  // namespace qp
