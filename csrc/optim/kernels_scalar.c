// SPDX-License-Identifier: Apache-2.0
// The reference kernels: docs/numerics.md written down once, one element at a time.
#include "internal.h"

#include <math.h>

/* One element's master and state. */
struct element {
	float p, m, v;
};

static float canonical(float value)
{
	return isnan(value) ? ofl_bits_to_float(OFL_OPTIM_NAN) : value;
}

static float load_master(const struct ofl_optim_operands *o, size_t i)
{
	uint32_t high;

	switch (o->codec) {
	case OFL_OPTIM_SPLIT:
		high = (uint32_t)((const uint16_t *)o->parameter)[i] << 16;
		return ofl_bits_to_float(
			high + (uint32_t)(int32_t)((const int16_t *)o->master)[i]);
	case OFL_OPTIM_FP32:
		return ((const float *)o->master)[i];
	default:
		return ((const float *)o->parameter)[i];
	}
}

/* Master to bf16: ties away from zero in bit space; the rest is master_low. */
static void store_master(const struct ofl_optim_operands *o, size_t i, float master)
{
	uint32_t bits = ofl_float_to_bits(master);
	uint16_t high = (uint16_t)((bits + 0x8000u) >> 16);

	if (o->codec == OFL_OPTIM_PARAMETER) {
		((float *)o->parameter)[i] = master;
		return;
	}
	((uint16_t *)o->parameter)[i] =
		o->parameter_dtype == OFL_OPTIM_F16 ? ofl_float_to_f16(master) : high;
	if (o->codec == OFL_OPTIM_SPLIT)
		((int16_t *)o->master)[i] = (int16_t)(uint16_t)bits;
	else
		((float *)o->master)[i] = master;
}

/* torch's sign(): 0 for NaN. */
static float sign(float value)
{
	return value > 0.0f ? 1.0f : value < 0.0f ? -1.0f : 0.0f;
}

static void update_adam(const struct ofl_optim_scalars *k, int is_decoupled, float g,
			struct element *at)
{
	float s, x, y, d, n;

	if (is_decoupled)
		at->p = at->p * k->q;
	s = g - at->m;
	if (k->c1 < 0.5f) {
		s = k->c1 * s;
		at->m = at->m + s;
	} else {
		s = s * (1.0f - k->c1);
		at->m = g - s;
	}
	x = k->b2 * at->v;
	y = k->c2 * g;
	y = y * g;
	at->v = x + y;
	d = sqrtf(at->v);
	d = d * k->r;
	d = d + k->e;
	n = k->u * at->m;
	n = n / d;
	at->p = at->p + n;
}

static void update_lion(const struct ofl_optim_scalars *k, float g, struct element *at)
{
	float x, y, s, n;

	at->p = at->p * k->q;
	x = k->b1 * at->m;
	y = k->c1 * g;
	s = x + y;
	n = k->u * sign(s);
	at->p = at->p + n;
	x = k->b2 * at->m;
	y = k->c2 * g;
	at->m = x + y;
}

static void update_momentum(const struct ofl_optim_scalars *k, float g,
			    struct element *at)
{
	float x = k->b1 * at->m;
	float y = k->c1 * g;
	float n;

	at->m = x + y;
	n = at->m;
	if (k->is_nesterov) {
		x = k->b1 * at->m;
		n = g + x;
	}
	n = k->u * n;
	at->p = at->p + n;
}

static void update_adagrad(const struct ofl_optim_scalars *k, float g, struct element *at)
{
	float x, y, d, n;

	x = at->v + k->a;
	y = g * g;
	at->v = x + y;
	d = sqrtf(at->v);
	d = d + k->e;
	n = k->u * g;
	n = n / d;
	at->p = at->p + n;
}

static void update(int rule, const struct ofl_optim_scalars *k, float g,
		   struct element *at)
{
	float n;

	/* Decay that goes into the gradient. */
	if (rule != OFL_OPTIM_ADAMW && rule != OFL_OPTIM_LION && k->w != 0.0f) {
		n = k->w * at->p;
		g = g + n;
	}
	switch (rule) {
	case OFL_OPTIM_ADAMW:
	case OFL_OPTIM_ADAM:
		update_adam(k, rule == OFL_OPTIM_ADAMW, g, at);
		break;
	case OFL_OPTIM_LION:
		update_lion(k, g, at);
		break;
	case OFL_OPTIM_MOMENTUM:
		update_momentum(k, g, at);
		break;
	case OFL_OPTIM_ADAGRAD:
		update_adagrad(k, g, at);
		break;
	default:
		n = k->u * g;
		at->p = at->p + n;
	}
}

static void update_range(const struct ofl_optim_operands *o,
			 const struct ofl_optim_scalars *k, size_t start, size_t stop)
{
	for (size_t i = start; i < stop; i++) {
		struct element at = {.p = load_master(o, i)};

		if (o->first)
			at.m = o->first[i];
		if (o->second)
			at.v = o->second[i];
		update(o->rule, k,
		       ofl_load_scaled(o->gradient, o->gradient_dtype, i, o->scales),
		       &at);
		if (o->first)
			o->first[i] = canonical(at.m);
		if (o->second)
			o->second[i] = canonical(at.v);
		store_master(o, i, canonical(at.p));
	}
}

static void masters(const struct ofl_optim_operands *o, size_t start, size_t num_elements,
		    float *out)
{
	for (size_t i = 0; i < num_elements; i++)
		out[i] = load_master(o, start + i);
}

static double norm(const void *values, int dtype, size_t num_elements,
		   const float scales[2])
{
	double lanes[OFL_OPTIM_NORM_LANES] = {0.0};

	for (size_t i = 0; i < num_elements; i++) {
		/* The square of a float64 made from fp32 is exact: 48 bits. */
		double g = (double)ofl_load_scaled(values, dtype, i, scales);

		lanes[i % OFL_OPTIM_NORM_LANES] += g * g;
	}
	return ofl_combine_lanes(lanes);
}

static uint64_t nonfinite(const void *values, int dtype, size_t num_elements)
{
	uint64_t count = 0;

	for (size_t i = 0; i < num_elements; i++)
		count += !isfinite(ofl_load(values, dtype, i));
	return count;
}

static void accumulate(void *accumulator, int accumulator_dtype, const void *gradient,
		       int gradient_dtype, size_t num_elements)
{
	for (size_t i = 0; i < num_elements; i++) {
		float sum = ofl_load(accumulator, accumulator_dtype, i) +
			    ofl_load(gradient, gradient_dtype, i);

		ofl_store(accumulator, accumulator_dtype, i, canonical(sum));
	}
}

static uint64_t read_words(const uint64_t *words, size_t num_words)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < num_words; i++)
		sum ^= words[i];
	return sum;
}

static void bare(const struct ofl_optim_bare_array *arrays, size_t num_arrays,
		 size_t start, size_t stop, int key)
{
	uint32_t folded = 0;

	for (size_t a = 0; a < num_arrays; a++) {
		uint32_t *words =
			(uint32_t *)(void *)(arrays[a].data + start * arrays[a].itemsize);
		const size_t num_words =
			(stop - start) * arrays[a].itemsize / sizeof(*words);

		for (size_t i = 0; i < num_words; i++) {
			uint32_t x =
				(arrays[a].is_read ? words[i] : OFL_OPTIM_BARE_BITS) +
				(uint32_t)key;

			folded += x;
			if (arrays[a].is_written)
				words[i] = x;
		}
	}
	/* So that no load is left out. */
	__asm__ volatile("" : : "r"(folded));
}

const struct ofl_optim_variant ofl_optim_scalar = {
	update_range, masters, norm, nonfinite, accumulate, read_words, bare,
};
