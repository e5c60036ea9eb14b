/* SPDX-License-Identifier: Apache-2.0 */
/* pass.h - kinds of passes over operands, for the C tests of the kernels. */
#ifndef OFL_TEST_PASS_H
#define OFL_TEST_PASS_H

#include "optim.h"

#include <stddef.h>

#define NUM_OPERANDS 5

/* A kind of pass. */
struct kind {
	int rule, codec, parameter_dtype, gradient_dtype;
};

static const struct ofl_optim_scalars scalars = {
	.b1 = 0.9f,
	.c1 = 0.1f,
	.b2 = 0.95f,
	.c2 = 0.05f,
	.q = 0.99f,
	.w = 0.1f,
	.u = -1e-3f,
	.r = 1.5f,
	.e = 1e-8f,
	.a = 0.25f,
	.is_nesterov = 1,
};

static size_t itemsize(int dtype)
{
	return dtype == OFL_OPTIM_F32 ? 4 : 2;
}

/* Bytes of one element of parameter, master, gradient, first and second; 0: there is
 * none. */
static void operand_itemsizes(struct kind kind, size_t sizes[NUM_OPERANDS])
{
	const int has_first =
		kind.rule != OFL_OPTIM_SGD && kind.rule != OFL_OPTIM_ADAGRAD;
	const int has_second = kind.rule == OFL_OPTIM_ADAMW ||
			       kind.rule == OFL_OPTIM_ADAM ||
			       kind.rule == OFL_OPTIM_ADAGRAD;

	sizes[0] = itemsize(kind.parameter_dtype);
	sizes[1] = kind.codec == OFL_OPTIM_SPLIT  ? 2
		   : kind.codec == OFL_OPTIM_FP32 ? 4
						  : 0;
	sizes[2] = itemsize(kind.gradient_dtype);
	sizes[3] = has_first ? 4 : 0;
	sizes[4] = has_second ? 4 : 0;
}

/* Operands whose arrays are NULL where `sizes` is 0. */
static struct ofl_optim_operands operands_over(void *const arrays[NUM_OPERANDS],
					       struct kind kind, size_t num_elements)
{
	return (struct ofl_optim_operands){
		.rule = kind.rule,
		.codec = kind.codec,
		.parameter_dtype = kind.parameter_dtype,
		.gradient_dtype = kind.gradient_dtype,
		.parameter = arrays[0],
		.master = arrays[1],
		.gradient = arrays[2],
		.first = arrays[3],
		.second = arrays[4],
		.num_elements = num_elements,
		.scales = {0.5f, 3.0f},
	};
}

#endif /* OFL_TEST_PASS_H */
