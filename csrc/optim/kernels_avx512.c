// SPDX-License-Identifier: Apache-2.0
// The AVX-512 kernels: vector types and operations for the templates.
#include "internal.h"

#if OFL_OPTIM_HAS_X86
#include <immintrin.h>

#define OFL_TARGET  __attribute__((target("avx512f,avx512bw,f16c")))
#define OFL_WIDTH   16
#define OFL_VARIANT ofl_optim_avx512
#define OP	    static inline __attribute__((always_inline)) OFL_TARGET

typedef __m512 vf;
typedef __m512i vi;
typedef __m512d vd;
typedef __m256 hf;

/* A table: one operation a line. */
// clang-format off
OP vf vf_load(const float *at) { return _mm512_loadu_ps(at); }
OP void vf_store(float *at, vf x) { _mm512_storeu_ps(at, x); }
OP vf vf_set1(float x) { return _mm512_set1_ps(x); }
OP vf vf_add(vf x, vf y) { return _mm512_add_ps(x, y); }
OP vf vf_sub(vf x, vf y) { return _mm512_sub_ps(x, y); }
OP vf vf_mul(vf x, vf y) { return _mm512_mul_ps(x, y); }
OP vf vf_div(vf x, vf y) { return _mm512_div_ps(x, y); }
OP vf vf_sqrt(vf x) { return _mm512_sqrt_ps(x); }
OP vi vi_add(vi x, vi y) { return _mm512_add_epi32(x, y); }
OP vi vi_set1(int x) { return _mm512_set1_epi32(x); }
OP vi vi_and(vi x, vi y) { return _mm512_and_si512(x, y); }
OP vi vi_shift_right_16(vi x) { return _mm512_srli_epi32(x, 16); }
OP vf vi_as_vf(vi x) { return _mm512_castsi512_ps(x); }
OP vi vf_as_vi(vf x) { return _mm512_castps_si512(x); }
OP vd vd_zero(void) { return _mm512_setzero_pd(); }
OP vd vd_add_square(vd sum, vd x) { return _mm512_fmadd_pd(x, x, sum); }
OP void vd_store(double *at, vd x) { _mm512_storeu_pd(at, x); }
OP vd vd_from(hf x) { return _mm512_cvtps_pd(x); }
OP hf hf_set1(float x) { return _mm256_set1_ps(x); }
OP hf hf_mul(hf x, hf y) { return _mm256_mul_ps(x, y); }
OP hf hf_load_f32(const float *at) { return _mm256_loadu_ps(at); }
OP void prefetch_line(const void *at) { _mm_prefetch(at, _MM_HINT_T0); }
OP void store_fence(void) { _mm_sfence(); }
// clang-format on

/* 16 bf16: those of even and of odd index. */
OP void hf_load_bf16_pairs(const void *at, hf *even, hf *odd)
{
	const __m256i x = _mm256_loadu_si256(at);

	*even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
	*odd = _mm256_castsi256_ps(
		_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)));
}

OP hf hf_load_f16(const void *at)
{
	return _mm256_cvtph_ps(_mm_loadu_si128(at));
}

/* NaN becomes the one NaN. */
OP vf vf_canonical(vf x)
{
	return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
				  vi_as_vf(vi_set1(OFL_OPTIM_NAN)));
}

/* Whether one of all lanes is NaN. */
OP int vf_any_nan(vf x, vf y)
{
	return _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q) != 0;
}

/* 1, -1 or 0; 0 for NaN. */
OP vf vf_sign(vf x)
{
	const vf zero = _mm512_setzero_ps();
	const vf sign = _mm512_mask_mov_ps(zero, _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ),
					   vf_set1(1.0f));

	return _mm512_mask_mov_ps(sign, _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ),
				  vf_set1(-1.0f));
}

/* 32 16-bit values into the upper halves of 32-bit ones, in order. */
OP void widen_high(const void *at, vi out[2])
{
	vi x = _mm512_loadu_si512(at);

	out[0] = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), 16);
	out[1] = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)),
				   16);
}

/* 32 signed 16-bit values into 32-bit ones, in order. */
OP void widen_signed(const void *at, vi out[2])
{
	vi x = _mm512_loadu_si512(at);

	out[0] = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(x));
	out[1] = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(x, 1));
}

OP void load_f16(const void *at, vf out[2])
{
	vi x = _mm512_loadu_si512(at);

	out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
	out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
}

#define NEAREST_EVEN (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

OP vi pack_f16(vf x, vf y)
{
	return _mm512_inserti64x4(
		_mm512_castsi256_si512(_mm512_cvtps_ph(x, NEAREST_EVEN)),
		_mm512_cvtps_ph(y, NEAREST_EVEN), 1);
}

/* Index of every second 16-bit word of a pair of vectors: 0, 2, .. 62. */
OP vi even_words(void)
{
	const vi lanes =
		_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
	const vi first = _mm512_slli_epi32(lanes, 2); /* 0, 4, .. 60 */

	return _mm512_or_si512(first, _mm512_slli_epi32(vi_add(first, vi_set1(2)), 16));
}

/* The lower, or upper, 16 bits of 32 32-bit values, in order. */
OP vi pack_low(vi x, vi y)
{
	return _mm512_permutex2var_epi16(x, even_words(), y);
}

OP vi pack_high(vi x, vi y)
{
	return _mm512_permutex2var_epi16(
		x, _mm512_or_si512(even_words(), vi_set1(0x00010001)), y);
}

OP void store_16(void *at, vi x, int is_streamed)
{
	if (is_streamed)
		_mm512_stream_si512(at, x);
	else
		_mm512_storeu_si512(at, x);
}

#include "update_template.h"

#include "gradient_template.h"
#else
typedef int ofl_optim_not_empty;
#endif
