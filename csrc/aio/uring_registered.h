/* SPDX-License-Identifier: Apache-2.0 */
/* uring_registered.h - memory and files that a ring of io_uring(7) was told of. */
#ifndef OFL_AIO_URING_REGISTERED_H
#define OFL_AIO_URING_REGISTERED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Without the library's header, or where the build says that it can't be linked, the
 * backend is there and refuses to start: whoever asks for it is told why. */
#if defined(__has_include) && !defined(OFL_AIO_NO_LIBURING)
#if __has_include(<liburing.h>)
#define OFL_AIO_HAVE_LIBURING
#endif
#endif

#ifdef OFL_AIO_HAVE_LIBURING

#include <liburing.h>

#define OFL_AIO_NUM_REGISTERED_PARTS 256
#define OFL_AIO_NUM_REGISTERED_FILES 64
#define OFL_AIO_NOT_REGISTERED	     (-1)

/* A part of registered memory: one buffer of the kernel. */
struct ofl_aio_registered_part {
	void *owner; /* the address that was given; one call may take several */
	char *start;
	size_t len; /* 0: the index is not in use */
};

/* The tables of one ring, as the kernel has them.  Not locked here. */
struct ofl_aio_registered {
	struct io_uring *uring;
	bool takes_memory, takes_files;
	uint32_t end_parts, end_files; /* indices below them may be in use */
	struct ofl_aio_registered_part parts[OFL_AIO_NUM_REGISTERED_PARTS];
	int files[OFL_AIO_NUM_REGISTERED_FILES]; /* descriptors; -1: not in use */
};

/* Make empty tables in the ring; a kernel without them takes no registrations. */
void ofl_aio_registered_init(struct ofl_aio_registered *registered,
			     struct io_uring *uring);

/* Give everything back at once: the kernel ends a ring some time after it is closed. */
void ofl_aio_registered_exit(struct ofl_aio_registered *registered);

/* As ofl_aio_register() and ofl_aio_register_file(). */
int ofl_aio_registered_add_memory(struct ofl_aio_registered *registered, void *buf,
				  size_t len);
int ofl_aio_registered_add_file(struct ofl_aio_registered *registered, int fd);

void ofl_aio_registered_drop_memory(struct ofl_aio_registered *registered,
				    const void *owner);
void ofl_aio_registered_drop_file(struct ofl_aio_registered *registered, int fd);

/* The index of what holds these bytes, or of this file, or OFL_AIO_NOT_REGISTERED. */
int ofl_aio_registered_find_memory(const struct ofl_aio_registered *registered,
				   const void *buf, size_t len);
int ofl_aio_registered_find_file(const struct ofl_aio_registered *registered, int fd);

#endif /* OFL_AIO_HAVE_LIBURING */
#endif /* OFL_AIO_URING_REGISTERED_H */
