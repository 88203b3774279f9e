/* Count, log and fail the file operations of a process below one folder.

   adversary_faults.py builds this library and preloads it, so that calls of Python, of Rust and of C
   libraries arrive here before the C library. It is armed by arm_faults(), or at the start of a
   process by the variables FAULTS_*. Only the process that was armed is affected, not its children. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char watched[PATH_MAX];
static long fail_at;    /* the number of the operation; 0 for none */
static int fail_error;  /* errno, or 0 for SIGKILL */
static int is_lasting;  /* also all later operations that need space */
static int log_fd = -1;
static pid_t armed_pid;
static atomic_long reached;

void arm_faults(const char *folder, long at, int error, int lasting, const char *log) {
    snprintf(watched, sizeof watched, "%s", folder);
    fail_at = at, fail_error = error, is_lasting = lasting;
    reached = 0;
    if (log[0])
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC,
                              0666);
    armed_pid = getpid();
}

__attribute__((constructor)) static void arm_by_environment(void) {
    const char *folder = getenv("FAULTS_FOLDER");
    if (folder)
        arm_faults(folder, atol(getenv("FAULTS_AT")), atoi(getenv("FAULTS_ERROR")), 0, "");
    unsetenv("FAULTS_FOLDER"); /* not for the processes that this one starts */
}

static int resolve(int folder, const char *path, char *whole) {
    char link[64];
    size_t used = 0;
    if (path == NULL || path[0] != '/') {
        if (folder == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, whole, PATH_MAX - 1);
        if (size < 0)
            return 0;
        used = (size_t)size;
        whole[used] = 0;
        if (path == NULL)
            return 1;
        whole[used++] = '/';
    }
    snprintf(whole + used, PATH_MAX - used, "%s", path);
    return 1;
}

/* Return whether the operation fails, with errno set. `half` does a part of it before that. */
static int fails(const char *name, int needs_space, int folder, const char *path,
                 void (*half)(int, const void *, size_t), const void *data, size_t size) {
    if (armed_pid == 0 || getpid() != armed_pid)
        return 0;
    int before = errno;
    char whole[PATH_MAX];
    if (!resolve(folder, path, whole) || strncmp(whole, watched, strlen(watched)) != 0) {
        errno = before;
        return 0;
    }
    long number = ++reached;
    if (log_fd >= 0) {
        char line[PATH_MAX + 32];
        int length = snprintf(line, sizeof line, "%s %s\n", name, whole);
        syscall(SYS_write, log_fd, line, length);
    }
    errno = before;
    int is_hit = number == fail_at || (is_lasting && fail_at && number > fail_at && needs_space);
    if (!is_hit)
        return 0;
    if (half)
        half(folder, data, size / 2);
    if (fail_error == 0)
        for (;;)
            kill(getpid(), SIGKILL);
    errno = fail_error;
    return 1;
}

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAILS(needs_space, folder, path) \
    fails(__func__, needs_space, folder, path, NULL, NULL, 0)

static void write_half(int file, const void *data, size_t size) {
    syscall(SYS_write, file, data, size);
}

#define OPEN(name)                                              \
    int name(const char *path, int flags, ...) {                \
        NEXT(name);                                             \
        va_list rest;                                           \
        va_start(rest, flags);                                  \
        mode_t mode = va_arg(rest, mode_t);                     \
        va_end(rest);                                           \
        if ((flags & O_ACCMODE) && FAILS(1, AT_FDCWD, path))    \
            return -1;                                          \
        return next(path, flags, mode);                         \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                            \
    int name(int folder, const char *path, int flags, ...) {    \
        NEXT(name);                                             \
        va_list rest;                                           \
        va_start(rest, flags);                                  \
        mode_t mode = va_arg(rest, mode_t);                     \
        va_end(rest);                                           \
        if ((flags & O_ACCMODE) && FAILS(1, folder, path))      \
            return -1;                                          \
        return next(folder, path, flags, mode);                 \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                          \
    FILE *name(const char *path, const char *mode) {                         \
        NEXT(name);                                                          \
        if (strpbrk(mode, "wa+") && FAILS(1, AT_FDCWD, path))                \
            return NULL;                                                     \
        return next(path, mode);                                             \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int file, const void *data, size_t size) {
    NEXT(write);
    return fails("write", 1, file, NULL, write_half, data, size) ? -1 : next(file, data, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    NEXT(writev);
    return FAILS(1, file, NULL) ? -1 : next(file, parts, count);
}

#define PWRITE(name)                                                         \
    ssize_t name(int file, const void *data, size_t size, off_t offset) {    \
        NEXT(name);                                                          \
        return FAILS(1, file, NULL) ? -1 : next(file, data, size, offset);   \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define TRUNCATE(name)                                                       \
    int name(int file, off_t size) {                                         \
        NEXT(name);                                                          \
        return FAILS(1, file, NULL) ? -1 : next(file, size);                 \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

int fsync(int file) {
    NEXT(fsync);
    return FAILS(1, file, NULL) ? -1 : next(file);
}

int fdatasync(int file) {
    NEXT(fdatasync);
    return FAILS(1, file, NULL) ? -1 : next(file);
}

int mkdir(const char *path, mode_t mode) {
    NEXT(mkdir);
    return FAILS(1, AT_FDCWD, path) ? -1 : next(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    NEXT(mkdirat);
    return FAILS(1, folder, path) ? -1 : next(folder, path, mode);
}

int chmod(const char *path, mode_t mode) {
    NEXT(chmod);
    return FAILS(0, AT_FDCWD, path) ? -1 : next(path, mode);
}

int fchmod(int file, mode_t mode) {
    NEXT(fchmod);
    return FAILS(0, file, NULL) ? -1 : next(file, mode);
}

int rename(const char *path, const char *target) {
    NEXT(rename);
    return FAILS(0, AT_FDCWD, path) ? -1 : next(path, target);
}

int renameat(int folder, const char *path, int other, const char *target) {
    NEXT(renameat);
    return FAILS(0, folder, path) ? -1 : next(folder, path, other, target);
}

int unlink(const char *path) {
    NEXT(unlink);
    return FAILS(0, AT_FDCWD, path) ? -1 : next(path);
}

int unlinkat(int folder, const char *path, int flags) {
    NEXT(unlinkat);
    return FAILS(0, folder, path) ? -1 : next(folder, path, flags);
}

int rmdir(const char *path) {
    NEXT(rmdir);
    return FAILS(0, AT_FDCWD, path) ? -1 : next(path);
}

int link(const char *path, const char *target) {
    NEXT(link);
    return FAILS(0, AT_FDCWD, target) ? -1 : next(path, target);
}

int symlink(const char *path, const char *target) {
    NEXT(symlink);
    return FAILS(0, AT_FDCWD, target) ? -1 : next(path, target);
}
