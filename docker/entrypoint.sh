#!/bin/sh
# What a container of lmsrun starts with: arguments and LMSRUN_* variables become a run, as a user without privileges.
#
#   (nothing)             the self check, `lmsrun check`
#   a command of lmsrun (run, plan, fit, top ...), -OPTION ..., PROGRAM.py ...
#                         lmsrun with these arguments; options may also come as LMSRUN_* variables, whatever their
#                         values hold; one that is a misspelt option ends the container with one line and exit code 2
#   sshd                  a host of a job that somebody else launches: sshd on port 2222, for the keys in the file
#                         that AUTHORIZED_KEYS names (default ~/.ssh/authorized_keys)
#   anything else         that command, as it is
#
# Every branch ends in exec, so that signals reach the job itself. tini in front of this file reaps what a job leaves.
set -eu

# Started as root (docker run --user 0): go on as the image's user. Open MPI would refuse root anyway.
if [ "$(id -u)" = 0 ] && id lmsrun >/dev/null 2>&1; then
    exec setpriv --reuid=lmsrun --regid=lmsrun --init-groups env HOME=/home/lmsrun "$0" "$@"
fi

# With a root file system that is read-only and no tmpfs on /tmp, the shared memory is what is left to write to.
: "${TMPDIR:=/tmp}"
if [ ! -w "$TMPDIR" ] && [ -w /dev/shm ]; then
    TMPDIR=/dev/shm
    export TMPDIR
fi

# An arbitrary user id (OpenShift, --user 12345) has no home and no name, and Open MPI, Keras and ssh want a home.
if [ ! -w "${HOME:-/}" ]; then
    HOME=$(mktemp -d "$TMPDIR/home.XXXXXX")
    export HOME
fi
if ! LOGNAME=${LOGNAME:-$(id -un 2>/dev/null)}; then
    LOGNAME=uid-$(id -u)
fi
export LOGNAME

start_sshd() {
    mkdir -p "$HOME/.ssh"
    chmod 700 "$HOME/.ssh"
    [ -f "$HOME/.ssh/host_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$HOME/.ssh/host_key"
    # A copy of our own, because sshd refuses a file that others could have written. It may be the named file itself.
    if [ -n "${AUTHORIZED_KEYS:-}" ]; then
        cmp -s "$AUTHORIZED_KEYS" "$HOME/.ssh/authorized_keys" || cp "$AUTHORIZED_KEYS" "$HOME/.ssh/authorized_keys"
        chmod 600 "$HOME/.ssh/authorized_keys" || true # a mount that cannot be changed
    fi
    # A login gets this container's environment: the ranks' programs are found by PATH.
    exec /usr/sbin/sshd -D -e -f /dev/null -p 2222 -h "$HOME/.ssh/host_key" \
        -o PidFile=none -o UsePAM=no -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \
        -o AuthorizedKeysFile="$HOME/.ssh/authorized_keys" -o SetEnv="PATH=$PATH"
}

case "${1-}" in
    '') exec lmsrun check ;;
    # All commands of lmsrun, as a test compares; the system's `top` gives way.
    run | plan | topo | report | check | fit | top | worker | ddlrun) exec lmsrun "$@" ;;
    build-horovod | completion | version | help | -* | *.py) exec lmsrun "$@" ;;
    sshd) start_sshd ;;
    *) exec "$@" ;;
esac
