/* Fails calls of the C library, as a machine does that has no memory, no disk or no processes left.

   LD_PRELOAD it. `fault_arm` names a function and an error number; from then on that function fails in the thread that
   called it, once or until `fault_disarm`. Everything else is the C library's. `fault_clock` moves the time of day. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/file.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static __thread char armed[32];
static __thread int error, always, failed;
static volatile long clock_offset;

void fault_arm(const char* function, int number, int every_time) {
    strncpy(armed, function, sizeof armed - 1);
    error = number, always = every_time, failed = 0;
}

/* How often the function failed since it was armed. */
int fault_disarm(void) {
    armed[0] = 0;
    return failed;
}

void fault_clock(long seconds) { clock_offset = seconds; }

static int fails(const char* function) {
    if (!armed[0] || strcmp(armed, function)) return 0;
    if (!always) armed[0] = 0;
    failed++;
    errno = error;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

pid_t fork(void) { return fails("fork") ? -1 : REAL(fork)(); }
/* a function around the real vfork would return twice from one frame */
pid_t vfork(void) { return fails("fork") ? -1 : REAL(fork)(); }
int mkdir(const char* path, mode_t mode) { return fails("mkdir") ? -1 : REAL(mkdir)(path, mode); }
int rmdir(const char* path) { return fails("unlink") ? -1 : REAL(rmdir)(path); }
int unlinkat(int fd, const char* path, int flags) { return fails("unlink") ? -1 : REAL(unlinkat)(fd, path, flags); }
int pipe2(int fds[2], int flags) { return fails("pipe") ? -1 : REAL(pipe2)(fds, flags); }
int flock(int fd, int how) { return fails("flock") ? -1 : REAL(flock)(fd, how); }
DIR* opendir(const char* path) { return fails("opendir") ? NULL : REAL(opendir)(path); }
ssize_t read(int fd, void* to, size_t bytes) { return fails("read") ? -1 : REAL(read)(fd, to, bytes); }
ssize_t write(int fd, const void* from, size_t bytes) { return fails("write") ? -1 : REAL(write)(fd, from, bytes); }
ssize_t recvmsg(int fd, struct msghdr* m, int flags) { return fails("recvmsg") ? -1 : REAL(recvmsg)(fd, m, flags); }
ssize_t sendmsg(int fd, const struct msghdr* m, int flags) { return fails("sendmsg") ? -1 : REAL(sendmsg)(fd, m, flags); }

int socketpair(int domain, int type, int protocol, int fds[2]) {
    return fails("socketpair") ? -1 : REAL(socketpair)(domain, type, protocol, fds);
}

int execve(const char* path, char* const arguments[], char* const environment[]) {
    return fails("execve") ? -1 : REAL(execve)(path, arguments, environment);
}

int select(int count, fd_set* in, fd_set* out, fd_set* bad, struct timeval* timeout) {
    return fails("select") ? -1 : REAL(select)(count, in, out, bad, timeout);
}

int open64(const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    return fails("open") ? -1 : REAL(open64)(path, flags, mode);
}

/* SQLite's writes */
ssize_t pwrite64(int fd, const void* from, size_t bytes, off64_t at) {
    return fails("pwrite") ? -1 : REAL(pwrite64)(fd, from, bytes, at);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* argument) {
    return fails("pthread_create") ? error : REAL(pthread_create)(thread, how, run, argument);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
    int done = REAL(clock_gettime)(clock, now);
    if (!done && clock == CLOCK_REALTIME) now->tv_sec += clock_offset;
    return done;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
    int done = REAL(gettimeofday)(now, zone);
    if (!done) now->tv_sec += clock_offset;
    return done;
}

time_t time(time_t* to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
