// Lets user-mode Linux 6.1 run on processors whose register state it does not know (AMX: 11 KB instead of 2.7 KB).
//
// That kernel restores a process's registers with the part of the state that it knows, and newer processors' kernels
// refuse anything but the whole. So where the part is refused, this reads the whole, replaces the part, and writes the
// whole. Loaded into the switch's process with LD_PRELOAD; nothing else is affected.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

typedef long (*ptrace_function)(int, int, void *, void *);

static long set_whole_state(ptrace_function next, int pid, const struct iovec *part)
{
	static char state[65536];
	struct iovec whole = { state, sizeof state };

	if (next(PTRACE_GETREGSET, pid, (void *)NT_X86_XSTATE, &whole) < 0 || part->iov_len > whole.iov_len)
		return -1;
	memcpy(state, part->iov_base, part->iov_len);
	return next(PTRACE_SETREGSET, pid, (void *)NT_X86_XSTATE, &whole);
}

long ptrace(enum __ptrace_request request, ...)
{
	static ptrace_function next;
	va_list arguments;

	va_start(arguments, request);
	int pid = va_arg(arguments, int);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);
	if (!next)
		next = (ptrace_function)dlsym(RTLD_NEXT, "ptrace");
	long result = next(request, pid, address, data);
	if (result < 0 && errno == EFAULT && request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE)
		return set_whole_state(next, pid, data);
	return result;
}
