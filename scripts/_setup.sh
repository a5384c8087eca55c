# shellcheck shell=bash
# Sourced by scripts/demo and scripts/test: everything between a bare machine and a ready .venv.
#
# Gives ROOT (the checkout) and PYTHON (the environment's interpreter), and the function
# `prepare EXTRAS`. Written for the bash 3.2 of macOS too.
#
# AIOMOONCAKE_PYTHON  the Python that makes .venv, instead of the first suitable one on PATH

set -euo pipefail

# What the user's shell has set for other projects must not leak into this one.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV CDPATH PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python
MADE_HERE=$VENV/.aiomooncake-root    # says that these scripts made it, and for which path

say() { printf '%s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# Run a command without its noise; on failure show its output.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 </dev/null || status=$?
    if [ "$status" -ne 0 ]; then cat "$log" >&2; fi
    rm -f "$log"
    return "$status"
}

# "3.11" for a Python that runs, nothing for one that does not (a pyenv shim, an old version's name).
python_version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# The engine has wheels for CPython 3.10-3.13; where no engine is installed, any newer one will do.
suitable_version() {
    case $1 in
        3.10 | 3.11 | 3.12 | 3.13) return 0 ;;
        3.[1-9][0-9]) ! wants_engine ;;
        *) return 1 ;;
    esac
}

wants_engine() {
    case ",$EXTRAS," in
        *,cpu,*) return 0 ;;
        *) return 1 ;;
    esac
}

wants_tests() {
    case ",$EXTRAS," in
        *,test,*) return 0 ;;
        *) return 1 ;;
    esac
}

python_range() { if wants_engine; then echo '3.10 to 3.13'; else echo '3.10 or newer'; fi; }

# Set BASE_PYTHON to the interpreter that makes the environment.
find_python() {
    local candidate version
    if [ -n "${AIOMOONCAKE_PYTHON:-}" ]; then
        version=$(python_version "$AIOMOONCAKE_PYTHON")
        suitable_version "$version" || die "AIOMOONCAKE_PYTHON=$AIOMOONCAKE_PYTHON is" \
            "${version:-no Python that runs}: name a Python $(python_range)."
        BASE_PYTHON=$AIOMOONCAKE_PYTHON
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if suitable_version "$(python_version "$candidate")"; then
            BASE_PYTHON=$candidate
            return
        fi
    done
    die "no Python $(python_range) found: install one, or name it in AIOMOONCAKE_PYTHON."
}

# Print the Debian packages that this machine lacks, one a line.
missing_packages() {
    local need_venv=$1 version
    local libraries=''
    if wants_engine; then
        libraries='libibverbs.so.1=libibverbs1 libnuma.so.1=libnuma1 libcurl.so.4=libcurl4'
    fi
    version=$(python_version "$BASE_PYTHON")
    # A minimal Python has no ctypes to look with; then all is asked for, which is harmless.
    "$BASE_PYTHON" - "$need_venv" "python$version-venv" "$libraries" <<'EOF'
import sys

need_venv, venv_package, libraries = sys.argv[1:]
try:
    import ctypes
    if need_venv:
        import ensurepip, venv
except ImportError:
    ctypes = None
    print(venv_package)
for pair in libraries.split():
    library, package = pair.split("=")
    try:
        if ctypes is None:
            raise OSError
        ctypes.CDLL(library)
    except OSError:
        print(package)
EOF
    # For tests with several hosts on one machine, which only root can make.
    if wants_tests && is_root && ! command -v ip >/dev/null; then
        if command -v apt-get >/dev/null; then echo iproute2; fi
    fi
}

is_root() { [ "$(id -u)" -eq 0 ]; }
may_sudo() { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }

# Run apt-get as root, if that is possible.
apt() {
    local command='env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=60'
    if ! is_root; then command="sudo -n $command"; fi
    # shellcheck disable=SC2086  # several words
    $command "$@"
}

# Install Debian packages, or say in one line which are wanted and why this script can't.
install_packages() {
    local packages="$*"
    local wanted="run 'apt-get install $packages' as root (elsewhere than on Debian: the packages like them), then try again."
    command -v apt-get >/dev/null || die "missing system packages: $wanted"
    is_root || may_sudo || die "missing system packages, and no right to install them: $wanted"
    say "Installing system packages: $packages"
    # A bare machine has no package lists: fetch them only when the first try shows it.
    apt install --no-install-recommends "$@" >/dev/null 2>&1 </dev/null && return
    quietly apt update || die "apt-get update failed (its output is above): $wanted"
    quietly apt install --no-install-recommends "$@" ||
        die "apt-get install failed (its output is above): $wanted"
}

# Unpack etcd into .etcd, for the tests of stores that find each other or their master by it. The
# package itself is not installed: it would start a service.
fetch_etcd() {
    local folder
    if command -v etcd >/dev/null || [ -x "$ROOT/.etcd/etcd" ]; then return; fi
    say "Fetching etcd into .etcd (from Debian's package etcd-server)"
    folder=$(mktemp -d) || return 0
    download() { (cd -- "$folder" && apt-get download etcd-server) >/dev/null 2>&1; }
    unpack() {
        dpkg-deb --fsys-tarfile "$folder"/*.deb | tar -xC "$folder" --strip-components=3 ./usr/bin/etcd &&
            mkdir -p -- "$ROOT/.etcd" &&
            mv -- "$folder/etcd" "$ROOT/.etcd/new" && # whole, before it has its name
            mv -- "$ROOT/.etcd/new" "$ROOT/.etcd/etcd"
    }
    # As above: package lists only when the first try shows that there are none.
    if ! { download || { apt update >/dev/null 2>&1 </dev/null && download; }; } || ! unpack; then
        say "etcd could not be fetched: put it on the PATH, or its tests fail in CI and are skipped elsewhere."
    fi
    rm -rf -- "$folder"
}

# Print why .venv can't be used as it is; nothing when it can.
environment_fault() {
    local version wanted
    if [ ! -e "$VENV" ] && [ ! -L "$VENV" ]; then
        echo 'there is none'
        return
    fi
    version=$(python_version "$PYTHON")
    wanted=${AIOMOONCAKE_PYTHON:+$(python_version "$AIOMOONCAKE_PYTHON")}
    if ! suitable_version "$version"; then
        echo "its Python is ${version:-broken}, wanted is $(python_range)"
    elif [ -n "$wanted" ] && [ "$wanted" != "$version" ]; then
        echo "its Python is $version, AIOMOONCAKE_PYTHON is $wanted"
    elif [ -e "$MADE_HERE" ] && [ "$(cat "$MADE_HERE")" != "$ROOT" ]; then
        echo "it was made for $(cat "$MADE_HERE")"
    elif ! is_stamped && ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        echo 'it has no pip'
    fi
}

# Make .venv from BASE_PYTHON, in place of one of ours that can't be used.
make_environment() {
    local fault=$1
    if [ -e "$VENV" ] || [ -L "$VENV" ]; then
        [ -e "$MADE_HERE" ] || die "$VENV can't be used ($fault) and was not made by this script:" \
            "remove it, then try again."
        say "Making .venv anew: $fault."
        rm -rf -- "$VENV" || die "can't remove $VENV: remove it by hand, then try again."
    fi
    say "Making .venv with $BASE_PYTHON ($("$BASE_PYTHON" -V 2>&1))"
    mkdir -p -- "$VENV" || die "can't make $VENV (the reason is above)."
    printf '%s\n' "$ROOT" >"$MADE_HERE" # first, so that a half-made one is known as ours
    quietly "$BASE_PYTHON" -m venv "$VENV" || die "can't make $VENV (the reason is above)."
}

# What an installation depends on. One stamp per set of extras: the demo's does not undo the tests'.
stamp_file() { printf '%s/.aiomooncake-%s.stamp' "$VENV" "${EXTRAS//,/-}"; }
stamp_text() {
    (cd -- "$ROOT" && cksum pyproject.toml aiomooncake/_version.py)
    printf '%s\n' "$ROOT" "$EXTRAS" "$(python_version "$PYTHON")"
}
is_stamped() { [ -e "$(stamp_file)" ] && [ "$(stamp_text)" = "$(cat "$(stamp_file)")" ]; }

# Make .venv ready with the package (editable) and the given extras, such as "cpu,cli".
prepare() {
    EXTRAS=$1
    local fault missing
    if [ "$(uname -s)" != Linux ]; then
        # The engine has Linux wheels only: elsewhere the in-memory engine serves.
        EXTRAS=$(printf '%s' ",$EXTRAS," | sed -e 's/,cpu,/,/' -e 's/^,//' -e 's/,$//')
    fi
    [ -w "$ROOT" ] || die "can't write to $ROOT: make it yours, or work in a clone of your own."

    # Everything that can fail for want of something comes before anything is removed.
    BASE_PYTHON=$PYTHON
    if [ -n "${AIOMOONCAKE_PYTHON:-}" ]; then find_python; fi
    fault=$(environment_fault)
    if [ -n "$fault" ]; then find_python; fi
    if [ "$(uname -s)" = Linux ]; then
        missing=$(missing_packages "$fault")
        # shellcheck disable=SC2086  # one word per package
        if [ -n "$missing" ]; then install_packages $missing; fi
        if wants_tests && wants_engine; then fetch_etcd; fi
    fi
    if [ -n "$fault" ]; then make_environment "$fault"; fi
    if ! is_stamped; then
        say "Installing aiomooncake[$EXTRAS] into .venv (the first time takes about a minute)"
        (cd -- "$ROOT" && quietly "$PYTHON" -m pip install --quiet --editable ".[$EXTRAS]") ||
            die "pip could not install aiomooncake[$EXTRAS] (its output is above)."
        stamp_text >"$(stamp_file)"
    fi
}
