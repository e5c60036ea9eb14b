/* SPDX-License-Identifier: Apache-2.0 */
/* uring_registered.c - memory and files that a ring of io_uring(7) was told of. */
#define _GNU_SOURCE
#include <errno.h>

#include "uring_registered.h"

#ifdef OFL_AIO_HAVE_LIBURING

/* Of the kernel: one registered buffer is at most 1 GiB; larger memory takes several. */
#define MAX_PART_BYTES ((size_t)1 << 30)

void ofl_aio_registered_init(struct ofl_aio_registered *registered,
			     struct io_uring *uring)
{
	*registered = (struct ofl_aio_registered){.uring = uring};
	for (int i = 0; i < OFL_AIO_NUM_REGISTERED_FILES; i++)
		registered->files[i] = -1;
	registered->takes_memory =
		!io_uring_register_buffers_sparse(uring, OFL_AIO_NUM_REGISTERED_PARTS);
	registered->takes_files =
		!io_uring_register_files_sparse(uring, OFL_AIO_NUM_REGISTERED_FILES);
}

void ofl_aio_registered_exit(struct ofl_aio_registered *registered)
{
	if (registered->takes_files)
		io_uring_unregister_files(registered->uring);
	if (registered->takes_memory)
		io_uring_unregister_buffers(registered->uring);
}

/* ---- memory ---- */

static int update_part(struct ofl_aio_registered *registered, uint32_t index,
		       struct ofl_aio_registered_part to)
{
	struct iovec vector = {.iov_base = to.start, .iov_len = to.len};
	int result = io_uring_register_buffers_update_tag(registered->uring, index,
							  &vector, NULL, 1);

	if (result < 0)
		return result;
	registered->parts[index] = to;
	if (to.len && index >= registered->end_parts)
		registered->end_parts = index + 1;
	return 0;
}

static int find_unused_part(const struct ofl_aio_registered *registered)
{
	for (int i = 0; i < OFL_AIO_NUM_REGISTERED_PARTS; i++)
		if (!registered->parts[i].len)
			return i;
	return -ENOSPC;
}

int ofl_aio_registered_add_memory(struct ofl_aio_registered *registered, void *buf,
				  size_t len)
{
	size_t part_len;

	if (!registered->takes_memory)
		return -EOPNOTSUPP;
	for (size_t done = 0; done < len; done += part_len) {
		struct ofl_aio_registered_part part = {.owner = buf,
						       .start = (char *)buf + done};
		int result = find_unused_part(registered);

		part_len = len - done;
		if (part_len > MAX_PART_BYTES)
			part_len = MAX_PART_BYTES;
		part.len = part_len;
		if (result >= 0)
			result = update_part(registered, (uint32_t)result, part);
		if (result < 0) {
			ofl_aio_registered_drop_memory(registered, buf);
			return result;
		}
	}
	return 0;
}

void ofl_aio_registered_drop_memory(struct ofl_aio_registered *registered,
				    const void *owner)
{
	const struct ofl_aio_registered_part none = {0};

	for (uint32_t i = 0; i < registered->end_parts; i++) {
		struct ofl_aio_registered_part *part = &registered->parts[i];

		if (!part->len || part->owner != owner)
			continue;
		/* If the kernel refuses, its entry stays and is not used any more. */
		if (update_part(registered, i, none) < 0)
			*part = none;
	}
}

int ofl_aio_registered_find_memory(const struct ofl_aio_registered *registered,
				   const void *buf, size_t len)
{
	const char *start = buf;

	for (uint32_t i = 0; i < registered->end_parts; i++) {
		const struct ofl_aio_registered_part *part = &registered->parts[i];

		if (start >= part->start && len <= part->len &&
		    (size_t)(start - part->start) <= part->len - len)
			return (int)i;
	}
	return OFL_AIO_NOT_REGISTERED;
}

/* ---- files ---- */

static int update_file(struct ofl_aio_registered *registered, int index, int fd)
{
	int result = io_uring_register_files_update(registered->uring, (unsigned)index,
						    &fd, 1);

	return result < 0 ? result : 0;
}

static int find_unused_file(const struct ofl_aio_registered *registered)
{
	for (int i = 0; i < OFL_AIO_NUM_REGISTERED_FILES; i++)
		if (registered->files[i] < 0)
			return i;
	return -ENOSPC;
}

int ofl_aio_registered_add_file(struct ofl_aio_registered *registered, int fd)
{
	int index, error;

	if (!registered->takes_files)
		return -EOPNOTSUPP;
	if (ofl_aio_registered_find_file(registered, fd) != OFL_AIO_NOT_REGISTERED)
		return 0;
	index = find_unused_file(registered);
	if (index < 0)
		return index;
	error = update_file(registered, index, fd);
	if (error)
		return error;
	registered->files[index] = fd;
	if ((uint32_t)index >= registered->end_files)
		registered->end_files = (uint32_t)index + 1;
	return 0;
}

void ofl_aio_registered_drop_file(struct ofl_aio_registered *registered, int fd)
{
	int index = ofl_aio_registered_find_file(registered, fd);

	if (index == OFL_AIO_NOT_REGISTERED)
		return;
	/* If the kernel refuses, it keeps the file open, and nobody uses the entry
	 * until the next file takes it. */
	update_file(registered, index, -1);
	registered->files[index] = -1;
}

int ofl_aio_registered_find_file(const struct ofl_aio_registered *registered, int fd)
{
	for (uint32_t i = 0; i < registered->end_files; i++)
		if (registered->files[i] == fd)
			return (int)i;
	return OFL_AIO_NOT_REGISTERED;
}

#else
typedef int ofl_aio_not_empty;
#endif
