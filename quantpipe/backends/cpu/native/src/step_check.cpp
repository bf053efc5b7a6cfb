// Compares a step's kernels of an instruction set with plain C++.
#include "step_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "aligned.h"

namespace qp {
namespace {

constexpr int kDim = 80, kHeads = 3, kBlock = 16, kTokens = 75;
constexpr int kKinds[] = {QP_KV_F32, QP_KV_INT8, QP_KV_INT8_STATIC, QP_KV_INT4};
constexpr float kScale = 0.02f;
// Sums of numbers near 1 in another order.
constexpr float kTolerance = 1e-4f;

// Between -2 and 2, the same everywhere.
std::vector<float> numbers(size_t count, uint32_t state) {
    std::vector<float> out(count);
    for (float& value : out) {
        state = state * 1664525u + 1013904223u;
        value = static_cast<float>(state >> 8) / 4194304.0f - 2.0f;
    }
    return out;
}

bool are_close(const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
        if (!(std::fabs(a[i] - b[i]) <= kTolerance)) return false;
    }
    return true;
}

std::vector<float> rows_by(const StepKernels& kernels) {
    constexpr int kSize = 77;
    std::vector<float> x = numbers(4 * kSize, 1), weight = numbers(kSize, 2);
    kernels.norm(x.data(), kSize, 4, kSize, weight.data(), 1e-5f, x.data(), kSize);
    kernels.add(x.data(), weight.data(), kSize);
    kernels.rope(x.data() + kSize, 1, kSize, 38, weight.data());
    for (const int activation : {QP_SILU, QP_GELU_TANH}) {
        kernels.gate(activation, x.data() + (2 + activation) * kSize, weight.data(), kSize, 1, kSize);
    }
    x.push_back(static_cast<float>(kernels.argmax(x.data(), kSize)));
    return x;
}

// Decodes, and a chunk of the last tokens, over keys and values as these kernels store them.
std::vector<float> attended_by(const StepKernels& kernels, int kind, std::vector<uint8_t>& stored) {
    const KVLayout layout = KVLayout::of(1, kDim, kBlock, kind, kind);
    constexpr int kNumBlocks = (kTokens + kBlock - 1) / kBlock;
    const std::vector<float> tokens = numbers(kTokens * 2 * kDim, 3), query = numbers(kTokens * kHeads * kDim, 4);
    Aligned cache(layout.block_bytes * kNumBlocks), scratch(attention_scratch_floats(kDim) * sizeof(float));
    int64_t table[kNumBlocks];
    for (int block = 0; block < kNumBlocks; ++block) table[block] = kNumBlocks - 1 - block;
    for (int t = 0; t < kTokens; ++t) {
        const float* key = tokens.data() + size_t(t) * 2 * kDim;
        kernels.kv_write(layout, cache.as<uint8_t>() + table[t / kBlock] * layout.block_bytes, t % kBlock, key,
                         key + kDim, kScale, kScale);
    }
    stored.assign(cache.as<uint8_t>(), cache.as<uint8_t>() + layout.block_bytes * kNumBlocks);
    std::vector<float> out(query.size());
    AttentionTask task{};
    task.layout = &layout, task.cache = cache.as<uint8_t>(), task.block_table = table;
    task.key_scale = task.value_scale = kScale, task.softmax_scale = 0.1f;
    task.ld_query = task.ld_out = kHeads * kDim, task.num_heads = kHeads;
    task.end_token = kTokens, task.scratch = scratch.as<float>();
    for (const int num_queries : {1, 2, 20}) {
        task.num_queries = num_queries, task.first_query = kTokens - num_queries;
        task.query = query.data() + num_queries * task.ld_query, task.out = out.data() + num_queries * task.ld_out;
        kernels.attend(task);
    }
    return out;
}

}  // namespace

const char* find_step_fault(const StepKernels& kernels, const StepKernels& plain) {
    if (!are_close(rows_by(kernels), rows_by(plain))) return "norms, rope or activations";
    for (const int kind : kKinds) {
        std::vector<uint8_t> stored, expected_stored;
        const std::vector<float> found = attended_by(kernels, kind, stored);
        const std::vector<float> expected = attended_by(plain, kind, expected_stored);
        if (stored != expected_stored) return "the KV cache's codes";
        if (!are_close(found, expected)) return "attention";
    }
    return nullptr;
}

}  // namespace qp
