// Compares an instruction set with plain C++; linears over the full range of weights and activations.
#include <cmath>
#include <memory>
#include <vector>

#include "isa.h"
#include "linear_pack.h"
#include "step_check.h"

namespace qp {
namespace {

constexpr int kN = 37, kK = 1088, kGroup = 64, kNumGroups = kK / kGroup;
constexpr int kTokenCounts[] = {1, 3, 14};

// A small generator: the same numbers everywhere.
struct Numbers {
    uint32_t state = 1;
    uint32_t next() {
        state = state * 1664525u + 1013904223u;
        return state >> 8;
    }
    int between(int low, int high) { return low + static_cast<int>(next() % static_cast<uint32_t>(high - low + 1)); }
};

std::vector<int8_t> integers(Numbers& numbers, size_t count, int low, int high) {
    std::vector<int8_t> out(count);
    // Long runs of the ends of the range are what overflows sums that are too narrow.
    for (size_t i = 0; i < count; ++i) {
        const size_t kind = i / kK % 4;
        const int any = numbers.between(low, high);
        out[i] = static_cast<int8_t>(kind == 0 ? low : kind == 1 ? high : any);
    }
    return out;
}

std::vector<float> floats(Numbers& numbers, size_t count) {
    std::vector<float> out(count);
    for (float& value : out) value = static_cast<float>(numbers.between(-32768, 32767)) / 4096.0f;
    return out;
}

struct Case {
    const char* name;
    bool is_exact;
    std::unique_ptr<Linear> linear;
};

std::vector<Case> cases() {
    Numbers numbers;
    const std::vector<float> dense = floats(numbers, size_t{kN} * kK), bias = floats(numbers, kN);
    std::vector<uint16_t> short_floats(dense.size());
    for (size_t i = 0; i < dense.size(); ++i) short_floats[i] = static_cast<uint16_t>(numbers.between(0x3f00, 0x40ff));
    const std::vector<int8_t> bytes = integers(numbers, dense.size(), -128, 127);
    const std::vector<int8_t> nibbles = integers(numbers, dense.size(), -8, 7);
    const std::vector<int8_t> zeros = integers(numbers, size_t{kN} * kNumGroups, -8, 7);
    const std::vector<float> scales = floats(numbers, size_t{kN} * kNumGroups);
    std::vector<Case> made;
    made.push_back({"float32 linear", false, pack_f32(kN, kK, dense.data(), bias.data())});
    made.push_back({"bfloat16 linear", false, pack_bf16(kN, kK, short_floats.data(), bias.data())});
    made.push_back({"w8a8 linear", true, pack_w8a8(kN, kK, bytes.data(), scales.data(), bias.data(), 127.5f)});
    for (const int activation_bits : {8, 16, 32}) {
        for (const int8_t* zero : {static_cast<const int8_t*>(nullptr), zeros.data()}) {
            for (const int bits : {4, 8}) {
                const int8_t* weights = bits == 4 ? nibbles.data() : bytes.data();
                made.push_back({bits == 4 ? "4-bit linear" : "8-bit linear", activation_bits != 32,
                                pack_integers(bits, kN, kK, kGroup, weights, scales.data(), zero, bias.data(),
                                              activation_bits)});
            }
        }
    }
    return made;
}

bool agree(const Case& test, int num_tokens, const LinearKernels& kernels, Threads& threads) {
    Numbers numbers;
    std::vector<float> x = floats(numbers, size_t(num_tokens) * kK);
    for (int k = 0; k < kK; ++k) x[k] = k % 2 == 0 ? 8.0f : -8.0f;
    for (int k = 0; k < kK / 2; ++k) x[k] = 8.0f;
    std::vector<float> found(size_t(num_tokens) * kN), expected(found.size());
    Workspace workspace;
    linear_run_with(kernels, *test.linear, x.data(), kK, num_tokens, found.data(), kN, workspace, threads);
    linear_run_with(isa_scalar()->linear, *test.linear, x.data(), kK, num_tokens, expected.data(), kN, workspace,
                    threads);
    // Values of up to 8 * 8 * 8, over K of them, in float32.
    const float tolerance = test.is_exact ? 0.0f : 512.0f * kK * 1e-6f;
    for (size_t i = 0; i < found.size(); ++i) {
        if (!(std::fabs(found[i] - expected[i]) <= tolerance)) return false;
    }
    return true;
}

}  // namespace

const char* find_fault(const Isa& isa) {
    if (&isa == isa_scalar()) return nullptr;
    Threads threads(1);
    for (const Case& test : cases()) {
        for (const int num_tokens : kTokenCounts) {
            if (!agree(test, num_tokens, isa.linear, threads)) return test.name;
        }
    }
    return find_step_fault(isa.step, isa_scalar()->step);
}

}  // namespace qp
