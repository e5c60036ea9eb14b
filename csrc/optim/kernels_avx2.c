// SPDX-License-Identifier: Apache-2.0
// The AVX2 kernels: vector types and operations for the templates; the streaming copy.
#include "internal.h"

#if OFL_OPTIM_HAS_X86
#include <immintrin.h>

/* Without fma: the compiler has no instruction to fuse with. */
#define OFL_TARGET  __attribute__((target("avx2,f16c")))
#define OFL_WIDTH   8
#define OFL_VARIANT ofl_optim_avx2
#define OP	    static inline __attribute__((always_inline)) OFL_TARGET

typedef __m256 vf;
typedef __m256i vi;
typedef __m256d vd;
typedef __m128 hf;

/* A table: one operation a line. */
// clang-format off
OP vf vf_load(const float *at) { return _mm256_loadu_ps(at); }
OP void vf_store(float *at, vf x) { _mm256_storeu_ps(at, x); }
OP vf vf_set1(float x) { return _mm256_set1_ps(x); }
OP vf vf_add(vf x, vf y) { return _mm256_add_ps(x, y); }
OP vf vf_sub(vf x, vf y) { return _mm256_sub_ps(x, y); }
OP vf vf_mul(vf x, vf y) { return _mm256_mul_ps(x, y); }
OP vf vf_div(vf x, vf y) { return _mm256_div_ps(x, y); }
OP vf vf_sqrt(vf x) { return _mm256_sqrt_ps(x); }
OP vi vi_add(vi x, vi y) { return _mm256_add_epi32(x, y); }
OP vi vi_set1(int x) { return _mm256_set1_epi32(x); }
OP vi vi_and(vi x, vi y) { return _mm256_and_si256(x, y); }
OP vi vi_shift_right_16(vi x) { return _mm256_srli_epi32(x, 16); }
OP vf vi_as_vf(vi x) { return _mm256_castsi256_ps(x); }
OP vi vf_as_vi(vf x) { return _mm256_castps_si256(x); }
OP vd vd_zero(void) { return _mm256_setzero_pd(); }
OP vd vd_add_square(vd sum, vd x) { return _mm256_add_pd(sum, _mm256_mul_pd(x, x)); }
OP void vd_store(double *at, vd x) { _mm256_storeu_pd(at, x); }
OP vd vd_from(hf x) { return _mm256_cvtps_pd(x); }
OP hf hf_set1(float x) { return _mm_set1_ps(x); }
OP hf hf_mul(hf x, hf y) { return _mm_mul_ps(x, y); }
OP hf hf_load_f32(const float *at) { return _mm_loadu_ps(at); }
OP hf hf_load_f16(const void *at) { return _mm_cvtph_ps(_mm_loadl_epi64(at)); }
OP void prefetch_line(const void *at) { _mm_prefetch(at, _MM_HINT_T0); }
OP void store_fence(void) { _mm_sfence(); }
// clang-format on

/* 8 bf16: those of even and of odd index. */
OP void hf_load_bf16_pairs(const void *at, hf *even, hf *odd)
{
	const __m128i x = _mm_loadu_si128(at);

	*even = _mm_castsi128_ps(_mm_slli_epi32(x, 16));
	*odd = _mm_castsi128_ps(_mm_and_si128(x, _mm_set1_epi32((int)0xffff0000u)));
}

/* NaN becomes the one NaN. */
OP vf vf_canonical(vf x)
{
	return _mm256_blendv_ps(x, vi_as_vf(vi_set1(OFL_OPTIM_NAN)),
				_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* Whether one of all lanes is NaN. */
OP int vf_any_nan(vf x, vf y)
{
	return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_UNORD_Q)) != 0;
}

/* 1, -1 or 0; 0 for NaN. */
OP vf vf_sign(vf x)
{
	const vf zero = _mm256_setzero_ps();
	const vf above = _mm256_cmp_ps(x, zero, _CMP_GT_OQ);
	const vf below = _mm256_cmp_ps(x, zero, _CMP_LT_OQ);

	return _mm256_or_ps(_mm256_and_ps(above, vf_set1(1.0f)),
			    _mm256_and_ps(below, vf_set1(-1.0f)));
}

/* 16 16-bit values into the upper halves of 32-bit ones, in order. */
OP void widen_high(const void *at, vi out[2])
{
	vi x = _mm256_loadu_si256(at);

	out[0] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), 16);
	out[1] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)),
				   16);
}

/* 16 signed 16-bit values into 32-bit ones, in order. */
OP void widen_signed(const void *at, vi out[2])
{
	vi x = _mm256_loadu_si256(at);

	out[0] = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(x));
	out[1] = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(x, 1));
}

OP void load_f16(const void *at, vf out[2])
{
	vi x = _mm256_loadu_si256(at);

	out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
	out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
}

/* To nearest even. */
OP vi pack_f16(vf x, vf y)
{
	return _mm256_setr_m128i(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT),
				 _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
}

/* packus works within 128-bit halves: put its quarters in order. */
OP vi pack_words(vi x, vi y)
{
	return _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8);
}

/* The lower, or upper, 16 bits of 16 32-bit values, in order. */
OP vi pack_low(vi x, vi y)
{
	const vi mask = vi_set1(0xffff);

	return pack_words(_mm256_and_si256(x, mask), _mm256_and_si256(y, mask));
}

OP vi pack_high(vi x, vi y)
{
	return pack_words(_mm256_srli_epi32(x, 16), _mm256_srli_epi32(y, 16));
}

OP void store_16(void *at, vi x, int is_streamed)
{
	if (is_streamed)
		_mm256_stream_si256(at, x);
	else
		_mm256_storeu_si256(at, x);
}

#include "update_template.h"

#include "gradient_template.h"

OFL_TARGET void ofl_optim_copy_avx2(unsigned char *dst, const unsigned char *src,
				    size_t num_bytes)
{
	size_t i = 0;

	for (; num_bytes - i >= 64; i += 64) {
		_mm256_stream_si256((void *)(dst + i),
				    _mm256_loadu_si256((const void *)(src + i)));
		_mm256_stream_si256((void *)(dst + i + 32),
				    _mm256_loadu_si256((const void *)(src + i + 32)));
	}
	memcpy(dst + i, src + i, num_bytes - i);
	_mm_sfence();
}
#else
typedef int ofl_optim_not_empty;
#endif
