// SPDX-License-Identifier: Apache-2.0
// The vector kernels, written once: included by kernels_avx2.c and kernels_avx512.c.
//
// The including file defines OFL_TARGET (the target attribute), OFL_WIDTH (floats of a
// vector), OFL_NAME(x) (x with the variant's suffix, for what is global), vector types vf
// (floats), vi (as many 32-bit integers), vd (half as many doubles) and the operations
// used below.  A step is 2 * OFL_WIDTH elements: one full vector of 16-bit values.

#define OFL_STEP   (2 * OFL_WIDTH)
#define OFL_INLINE static inline __attribute__((always_inline)) OFL_TARGET

/*
 * Elements ahead that a step asks for: about one memory latency.  On two cores of an
 * AMD EPYC, with 4 KiB and with huge pages, 128 was never slower than none, 256, 512
 * or 1024, and up to a tenth faster than 512 where bandwidth was not the bound.
 * Beyond the end of an array a prefetch does nothing.
 */
#define OFL_PREFETCH   128
#define OFL_CACHE_LINE 64

/* The scalars of a range, one per lane, and what does not change within a call. */
struct constants {
	vf c, c2, b2, q, u, r, e, k1, k2;
	/* [Note: one form of lerp] m + c1*s and g - s*(1-c1) are base + c*s with
	 * c = c1 or -(1-c1): negation is exact and x - y is x + (-y). */
	int base_is_gradient;
};

/* One step's operands: at the pass's index, or in a copy of a partial step. */
struct pointers {
	void *parameter, *master;
	const void *gradient;
	float *exp_avg, *exp_avg_sq;
};

OFL_INLINE void prefetch(const void *array, size_t itemsize)
{
	uintptr_t address = (uintptr_t)array + OFL_PREFETCH * itemsize;

	for (size_t i = 0; i < OFL_STEP * itemsize; i += OFL_CACHE_LINE)
		_mm_prefetch((const char *)(address + i), _MM_HINT_T0);
}

OFL_INLINE void load_bf16(const void *array, vf out[2])
{
	vi bits[2];

	widen_high(array, bits);
	out[0] = vi_as_vf(bits[0]);
	out[1] = vi_as_vf(bits[1]);
}

OFL_INLINE void load_values(const void *array, int dtype, vf out[2])
{
	if (dtype == OFL_OPTIM_BF16) {
		load_bf16(array, out);
	} else {
		out[0] = vf_load((const float *)array);
		out[1] = vf_load((const float *)array + OFL_WIDTH);
	}
}

OFL_INLINE void load_master(const struct pointers *at, int codec, vf out[2])
{
	vi high[2], low[2];

	if (codec == OFL_OPTIM_SPLIT) {
		widen_high(at->parameter, high);
		widen_signed(at->master, low);
		out[0] = vi_as_vf(vi_add(high[0], low[0]));
		out[1] = vi_as_vf(vi_add(high[1], low[1]));
	} else {
		load_values(codec == OFL_OPTIM_FP32 ? at->master : at->parameter,
			    OFL_OPTIM_F32, out);
	}
}

OFL_INLINE void store_master(const struct pointers *at, int codec, int is_streamed,
			     const vf master[2])
{
	const vi half = vi_set1(0x8000);
	float *floats = codec == OFL_OPTIM_FP32 ? at->master : at->parameter;
	vi bits[2] = {vf_as_vi(master[0]), vf_as_vi(master[1])};

	if (codec == OFL_OPTIM_SPLIT) {
		store_16(at->master, pack_low(bits[0], bits[1]), 0);
	} else {
		vf_store(floats, master[0]);
		vf_store(floats + OFL_WIDTH, master[1]);
	}
	if (codec != OFL_OPTIM_PARAMETER)
		store_16(at->parameter,
			 pack_high(vi_add(bits[0], half), vi_add(bits[1], half)),
			 is_streamed);
}

/* docs/numerics.md, AdamW: in that order, nothing fused. */
OFL_INLINE void update(const struct constants *k, vf g, vf *p, vf *m, vf *v)
{
	vf s, x, y, d, n;

	/* A factor of 1 changes no bit, so that none is left out here. */
	g = vf_mul(g, k->k1);
	g = vf_mul(g, k->k2);
	s = vf_mul(k->c, vf_sub(g, *m));
	*m = vf_add(k->base_is_gradient ? g : *m, s);
	x = vf_mul(k->b2, *v);
	y = vf_mul(k->c2, g);
	y = vf_mul(y, g);
	*v = vf_add(x, y);
	d = vf_mul(vf_sqrt(*v), k->r);
	d = vf_add(d, k->e);
	n = vf_div(vf_mul(k->u, *m), d);
	*p = vf_canonical(vf_add(vf_mul(*p, k->q), n));
	*m = vf_canonical(*m);
	*v = vf_canonical(*v);
}

OFL_INLINE void step(const struct constants *k, const struct pointers *at, int codec,
		     int gradient_dtype, int is_streamed)
{
	vf p[2], g[2], m[2], v[2];

	load_master(at, codec, p);
	load_values(at->gradient, gradient_dtype, g);
	load_values(at->exp_avg, OFL_OPTIM_F32, m);
	load_values(at->exp_avg_sq, OFL_OPTIM_F32, v);
	for (int i = 0; i < 2; i++) {
		update(k, g[i], &p[i], &m[i], &v[i]);
		vf_store(at->exp_avg + i * OFL_WIDTH, m[i]);
		vf_store(at->exp_avg_sq + i * OFL_WIDTH, v[i]);
	}
	store_master(at, codec, is_streamed, p);
}

static inline size_t parameter_itemsize(int codec)
{
	return codec == OFL_OPTIM_PARAMETER ? sizeof(float) : sizeof(uint16_t);
}

static inline size_t master_itemsize(int codec)
{
	return codec == OFL_OPTIM_SPLIT ? sizeof(int16_t) : sizeof(float);
}

static inline size_t gradient_itemsize(int dtype)
{
	return dtype == OFL_OPTIM_BF16 ? sizeof(uint16_t) : sizeof(float);
}

OFL_INLINE struct pointers pointers_at(const struct ofl_optim_adamw *o, int codec,
				       int gradient_dtype, size_t i)
{
	struct pointers at = {
		.parameter = (char *)o->parameter + i * parameter_itemsize(codec),
		.gradient =
			(const char *)o->gradient + i * gradient_itemsize(gradient_dtype),
		.exp_avg = o->exp_avg + i,
		.exp_avg_sq = o->exp_avg_sq + i,
	};

	if (codec != OFL_OPTIM_PARAMETER)
		at.master = (char *)o->master + i * master_itemsize(codec);
	return at;
}

/* Fewer than OFL_STEP elements: a whole step on copies.  The rest of a copy is 0. */
OFL_INLINE void partial_step(const struct constants *k, const struct pointers *at,
			     int codec, int gradient_dtype, size_t num_elements)
{
	float parameter[OFL_STEP] = {0}, master[OFL_STEP] = {0}, gradient[OFL_STEP] = {0};
	float exp_avg[OFL_STEP] = {0}, exp_avg_sq[OFL_STEP] = {0};
	const struct pointers copy = {parameter, master, gradient, exp_avg, exp_avg_sq};
	const size_t parameter_bytes = num_elements * parameter_itemsize(codec);
	const size_t master_bytes = num_elements * master_itemsize(codec);
	const size_t moment_bytes = num_elements * sizeof(float);

	memcpy(parameter, at->parameter, parameter_bytes);
	if (codec != OFL_OPTIM_PARAMETER)
		memcpy(master, at->master, master_bytes);
	memcpy(gradient, at->gradient, num_elements * gradient_itemsize(gradient_dtype));
	memcpy(exp_avg, at->exp_avg, moment_bytes);
	memcpy(exp_avg_sq, at->exp_avg_sq, moment_bytes);
	step(k, &copy, codec, gradient_dtype, 0);
	memcpy(at->parameter, parameter, parameter_bytes);
	if (codec != OFL_OPTIM_PARAMETER)
		memcpy(at->master, master, master_bytes);
	memcpy(at->exp_avg, exp_avg, moment_bytes);
	memcpy(at->exp_avg_sq, exp_avg_sq, moment_bytes);
}

/* Elements until the parameter is aligned for a streaming store. */
static inline size_t head_elements(const void *parameter, size_t num_elements)
{
	size_t head = ((size_t)0 - (uintptr_t)parameter) % (OFL_STEP * sizeof(uint16_t)) /
		      sizeof(uint16_t);

	return head < num_elements ? head : num_elements;
}

/*
 * Codec and gradient dtype are constants here, so that each pair is a loop of its
 * own.  The bf16 parameter is written past the cache: nobody reads it soon, and under
 * codec fp32 it need not be read to be written.  Streaming the other outputs, which
 * have just been read, was slower.
 */
OFL_INLINE void pass(const struct ofl_optim_adamw *o, const struct constants *k,
		     int codec, int gradient_dtype, size_t i, size_t stop)
{
	struct pointers at = pointers_at(o, codec, gradient_dtype, i);
	size_t head = head_elements(at.parameter, stop - i);

	if (codec != OFL_OPTIM_PARAMETER && head) {
		partial_step(k, &at, codec, gradient_dtype, head);
		i += head;
	}
	for (; stop - i >= OFL_STEP; i += OFL_STEP) {
		at = pointers_at(o, codec, gradient_dtype, i);
		if (codec != OFL_OPTIM_FP32)
			prefetch(at.parameter, parameter_itemsize(codec));
		if (codec != OFL_OPTIM_PARAMETER)
			prefetch(at.master, master_itemsize(codec));
		prefetch(at.gradient, gradient_itemsize(gradient_dtype));
		prefetch(at.exp_avg, sizeof(float));
		prefetch(at.exp_avg_sq, sizeof(float));
		step(k, &at, codec, gradient_dtype, 1);
	}
	if (i < stop) {
		at = pointers_at(o, codec, gradient_dtype, i);
		partial_step(k, &at, codec, gradient_dtype, stop - i);
	}
	/* Streaming stores are ordered by nothing else before the pool's lock. */
	_mm_sfence();
}

OFL_INLINE void pass_codec(const struct ofl_optim_adamw *o, const struct constants *k,
			   int codec, size_t start, size_t stop)
{
	if (o->gradient_dtype == OFL_OPTIM_BF16)
		pass(o, k, codec, OFL_OPTIM_BF16, start, stop);
	else
		pass(o, k, codec, OFL_OPTIM_F32, start, stop);
}

OFL_TARGET void OFL_NAME(ofl_optim_adamw)(const struct ofl_optim_adamw *o,
					  const struct ofl_optim_adamw_scalars *s,
					  size_t start, size_t stop)
{
	const int base_is_gradient = !(s->c1 < 0.5f);
	const struct constants k = {
		.c = vf_set1(base_is_gradient ? -(1.0f - s->c1) : s->c1),
		.c2 = vf_set1(s->c2),
		.b2 = vf_set1(s->b2),
		.q = vf_set1(s->q),
		.u = vf_set1(s->u),
		.r = vf_set1(s->r),
		.e = vf_set1(s->e),
		.k1 = vf_set1(o->scales[0]),
		.k2 = vf_set1(o->scales[1]),
		.base_is_gradient = base_is_gradient,
	};

	if (o->codec == OFL_OPTIM_SPLIT)
		pass_codec(o, &k, OFL_OPTIM_SPLIT, start, stop);
	else if (o->codec == OFL_OPTIM_FP32)
		pass_codec(o, &k, OFL_OPTIM_FP32, start, stop);
	else
		pass_codec(o, &k, OFL_OPTIM_PARAMETER, start, stop);
}

/* Adds the squares of 16 elements, one per lane. */
OFL_INLINE void add_squares(vd lanes[OFL_OPTIM_NORM_LANES * 2 / OFL_WIDTH],
			    const vf *values, vf k1, vf k2)
{
	for (int i = 0; i < OFL_OPTIM_NORM_LANES / OFL_WIDTH; i++) {
		vf g = vf_mul(vf_mul(values[i], k1), k2);
		vd low = vd_from_low(g), high = vd_from_high(g);

		lanes[2 * i] = vd_add(lanes[2 * i], vd_mul(low, low));
		lanes[2 * i + 1] = vd_add(lanes[2 * i + 1], vd_mul(high, high));
	}
}

/* 32 elements: whole steps of either width. */
#define OFL_NORM_STEP (2 * OFL_OPTIM_NORM_LANES)

OFL_INLINE void norm_step(vd *lanes, const char *at, int dtype, vf k1, vf k2)
{
	const size_t itemsize = gradient_itemsize(dtype);
	vf values[OFL_NORM_STEP / OFL_WIDTH];

	for (int i = 0; i < OFL_NORM_STEP; i += OFL_STEP)
		load_values(at + (size_t)i * itemsize, dtype, &values[i / OFL_WIDTH]);
	add_squares(lanes, values, k1, k2);
	add_squares(lanes, values + OFL_OPTIM_NORM_LANES / OFL_WIDTH, k1, k2);
}

OFL_INLINE double norm_block(const char *at, int dtype, size_t num_elements,
			     const float scales[2])
{
	const vf k1 = vf_set1(scales[0]), k2 = vf_set1(scales[1]);
	const size_t itemsize = gradient_itemsize(dtype);
	vd vectors[OFL_OPTIM_NORM_LANES * 2 / OFL_WIDTH];
	double lanes[OFL_OPTIM_NORM_LANES];
	size_t i;

	for (i = 0; i < OFL_OPTIM_NORM_LANES * 2 / OFL_WIDTH; i++)
		vectors[i] = vd_zero();
	for (; num_elements >= OFL_NORM_STEP; num_elements -= OFL_NORM_STEP) {
		prefetch(at, itemsize);
		norm_step(vectors, at, dtype, k1, k2);
		at += OFL_NORM_STEP * itemsize;
	}
	for (i = 0; i < OFL_OPTIM_NORM_LANES * 2 / OFL_WIDTH; i++)
		vd_store(lanes + i * OFL_WIDTH / 2, vectors[i]);
	for (i = 0; i < num_elements; i++) {
		double g = (double)ofl_load_gradient(at, dtype, i, scales);

		lanes[i % OFL_OPTIM_NORM_LANES] += g * g;
	}
	return ofl_combine_lanes(lanes);
}

OFL_TARGET double OFL_NAME(ofl_optim_norm)(const void *gradient, int dtype,
					   size_t num_elements, const float scales[2])
{
	if (dtype == OFL_OPTIM_BF16)
		return norm_block(gradient, OFL_OPTIM_BF16, num_elements, scales);
	return norm_block(gradient, OFL_OPTIM_F32, num_elements, scales);
}
