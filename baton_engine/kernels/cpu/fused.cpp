// The small operations between a decoder's matrix products, each one pass over memory.

#include <algorithm>
#include <cmath>
#include <vector>

#include "team.h"

namespace baton {
namespace {

constexpr int64_t WORTH_A_TEAM = 65536;  // elements below which waking the other threads costs more than it gives

// 1 / root mean square of `size` elements.
template <typename T>
float inverse_rms(const T* x, int64_t size, float eps) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; i++) total += widen(x[i]) * widen(x[i]);
    return 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
}

template <typename T>
void gate_line(const T* gate, const T* up, T* out) {
    store(out, silu(load(gate)) * load(up));
}

template <typename T>
struct Rotated {
    const float *cos, *sin;  // of one token, head_dim / 2 each
    int64_t head_dim;
    float eps;

    // out = rotate(norm(head)); element i pairs with element i + head_dim / 2.
    template <typename Out>
    void operator()(const T* head, const T* norm, float* wide, Out* out) const {
        float scale = norm ? inverse_rms(head, head_dim, eps) : 1.0f;
        for (int64_t i = 0; i < head_dim; i++)
            wide[i] = norm ? widen(head[i]) * scale * widen(norm[i]) : widen(head[i]);
        const int64_t half = head_dim / 2;
        const float* other = wide + half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) narrow(wide[i] * cos[i] - other[i] * sin[i], out[i]);
#pragma omp simd
        for (int64_t i = 0; i < half; i++) narrow(other[i] * cos[i] + wide[i] * sin[i], out[half + i]);
    }
};

}  // namespace

template <typename T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t hidden, float eps) {
    if (residual) {
#pragma omp simd
        for (int64_t i = 0; i < hidden; i++) narrow(widen(residual[i]) + widen(x[i]), residual[i]);
        x = residual;
    }
    float scale = inverse_rms(x, hidden, eps);
#pragma omp simd
    for (int64_t i = 0; i < hidden; i++) narrow(widen(x[i]) * scale * widen(weight[i]), out[i]);
}

template <typename T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t tokens, int64_t hidden, float eps) {
#pragma omp for
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t row = token * hidden;
        norm_row(x + row, residual ? residual + row : nullptr, weight, out + row, hidden, eps);
    }
}

template <typename T>
void silu_mul(const T* x, T* out, int64_t tokens, int64_t width) {
#pragma omp for
    for (int64_t token = 0; token < tokens; token++) {
        const T *gate = x + token * 2 * width, *up = gate + width;
        T* to = out + token * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) gate_line(gate + i, up + i, to + i);
        if (i < width) {
            T padded[3][LANES] = {};
            std::copy(gate + i, gate + width, padded[0]);
            std::copy(up + i, up + width, padded[1]);
            gate_line(padded[0], padded[1], padded[2]);
            std::copy(padded[2], padded[2] + width - i, to + i);
        }
    }
}

template <typename T, typename K>
void rotate_and_store(const Rotation<T, K>& with, const T* qkv, T* query, int64_t tokens, bool waits) {
    const int64_t heads = with.heads, kv_heads = with.kv_heads, head_dim = with.head_dim, group = heads / kv_heads;
    const int64_t line = (heads + 2 * kv_heads) * head_dim, half_page = with.block_tokens * head_dim;
    static thread_local std::vector<float> wide;
    wide.resize(head_dim);
    // For one token as many rounds, by the same schedule, as in `attend_one_token`.
#pragma omp for schedule(static) nowait
    for (int64_t item = 0; item < tokens * kv_heads; item++) {
        const int64_t token = item / kv_heads, head = item % kv_heads, turn = token * head_dim / 2;
        Rotated<T> rotated{with.cos + turn, with.sin + turn, head_dim, with.eps};
        const T* from = qkv + token * line;
        T* to = query + token * heads * head_dim;
        for (int64_t h = head * group; h < (head + 1) * group; h++)
            rotated(from + h * head_dim, with.query_norm, wide.data(), to + h * head_dim);
        const T *key = from + (heads + head) * head_dim, *value = key + kv_heads * head_dim;
        const int64_t block = with.slots[token] / with.block_tokens, offset = with.slots[token] % with.block_tokens;
        K* cell = with.pages + (block * kv_heads + head) * 2 * half_page + offset * head_dim;
        rotated(key, with.key_norm, wide.data(), cell);
#pragma omp simd
        for (int64_t i = 0; i < head_dim; i++) narrow(widen(value[i]), cell[half_page + i]);
    }
    if (waits) {
#pragma omp barrier
    }
}

}  // namespace baton

#define BATON_FUSED(SUFFIX, T)                                                                      \
    template void baton::norm_row<T>(const T*, T*, const T*, T*, int64_t, float);                   \
    template void baton::rms_norm<T>(const T*, T*, const T*, T*, int64_t, int64_t, float);          \
    template void baton::silu_mul<T>(const T*, T*, int64_t, int64_t);                               \
    extern "C" void baton_rms_norm_##SUFFIX(const T* x, T* residual, const T* weight, T* out,       \
                                            int64_t tokens, int64_t hidden, float eps,              \
                                            int64_t num_threads) {                                  \
        _Pragma("omp parallel num_threads(static_cast<int>(num_threads)) if (tokens * hidden > baton::WORTH_A_TEAM)") \
        baton::rms_norm<T>(x, residual, weight, out, tokens, hidden, eps);                          \
    }                                                                                               \
    extern "C" void baton_silu_mul_##SUFFIX(const T* x, T* out, int64_t tokens, int64_t width,      \
                                            int64_t num_threads) {                                  \
        _Pragma("omp parallel num_threads(static_cast<int>(num_threads)) if (tokens * width > baton::WORTH_A_TEAM)") \
        baton::silu_mul<T>(x, out, tokens, width);                                                  \
    }

#define BATON_ROTATE_AND_STORE(NAME, T, K)                                                          \
    template void baton::rotate_and_store<T, K>(const Rotation<T, K>&, const T*, T*, int64_t, bool); \
    extern "C" void NAME(                                                                           \
        const T* qkv, const float* cos, const float* sin, const T* query_norm, const T* key_norm,   \
        K* pages, const int64_t* slots, T* query, int64_t tokens, int64_t heads, int64_t kv_heads,  \
        int64_t head_dim, int64_t block_tokens, float eps, int64_t num_threads) {                   \
        baton::Rotation<T, K> rotation{cos,   sin,      query_norm, key_norm,     pages, slots,     \
                                       heads, kv_heads, head_dim,   block_tokens, eps};             \
        _Pragma("omp parallel num_threads(static_cast<int>(num_threads)) if (tokens * heads * head_dim > baton::WORTH_A_TEAM)") \
        baton::rotate_and_store<T, K>(rotation, qkv, query, tokens, true);                          \
    }

BATON_FUSED(float32, float)
BATON_FUSED(bfloat16, baton::bfloat16)
BATON_ROTATE_AND_STORE(baton_rotate_and_store_float32_float32, float, float)
BATON_ROTATE_AND_STORE(baton_rotate_and_store_float32_bfloat16, float, baton::bfloat16)
BATON_ROTATE_AND_STORE(baton_rotate_and_store_bfloat16_bfloat16, baton::bfloat16, baton::bfloat16)
