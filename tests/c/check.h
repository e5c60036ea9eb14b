/* SPDX-License-Identifier: Apache-2.0 */
/* check.h - what the C test programs share. They exit 0 (passed), 1 or 77 (skipped). */
#ifndef OFL_TEST_CHECK_H
#define OFL_TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define SKIPPED 77

/* Unlike assert() it is there in every build. */
#define CHECK(condition)                                                                 \
	do {                                                                             \
		if (!(condition)) {                                                      \
			fprintf(stderr, "%s:%d: %s: not true: %s\n", __FILE__, __LINE__, \
				__func__, #condition);                                   \
			exit(1);                                                         \
		}                                                                        \
	} while (0)

#define CHECK_EQUAL(found, expected)                                                  \
	do {                                                                          \
		long long found_ = (long long)(found);                                \
		long long expected_ = (long long)(expected);                          \
		if (found_ != expected_) {                                            \
			fprintf(stderr, "%s:%d: %s: %s: expected %lld, found %lld\n", \
				__FILE__, __LINE__, __func__, #found, expected_,      \
				found_);                                              \
			exit(1);                                                      \
		}                                                                     \
	} while (0)

#endif /* OFL_TEST_CHECK_H */
