# A RabbitMQ of one's own, for scripts to source: found on this machine or unpacked
# from the distribution's package, and run as a private node.
#
# One node at a time: whoever needs several keeps each in a subshell of its own.
# The sourcing script says what `run COMMAND...` is: a subshell that its signals reach.
# shellcheck shell=bash disable=SC1091,SC2034 # /etc/os-release; what the sourcing script reads

cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/lapin-retry/rabbitmq

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
refuse() { say "$@"; exit 2; }

# Why each way that was tried is not the one, for the message if none is.
reasons=()
not_this() { reasons+=("$*"); return 1; }

node=      # the broker's pid, which is also its process group
node_name=
data=      # the broker's files
certificates= # where they are, if the broker has TLS
server=    # what starts it: find_installed or find_unpacked
enter=()   # how to get to where the server is
path=      # the PATH there
root=      # where that is, seen from here
version=   # what the broker says it is

# A zombie whose parent is slow to collect it has no executable any more.
alive() { kill -0 "$1" 2>/dev/null && [[ ! -d /proc/self || -e /proc/$1/exe ]]; }

# ---------------------------------------------------------------- a private node

port_open() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# Five neighbours that nobody listens on, below the ports that the kernel gives
# to outgoing connections; the first ones from first_port on, if that is set.
pick_ports() {
  local port next=${first_port:-}
  while :; do
    amqp=${next:-$((20000 + RANDOM % 1500 * 8))} next=${next:+$((next + 8))}
    management=$((amqp + 1)) dist=$((amqp + 2)) epmd=$((amqp + 3))
    amqps=$((amqp + 4))
    for port in $amqp $management $dist $epmd $amqps; do port_open "$port" && continue 2; done
    return
  done
}

# The management API's overview; by hand, as a minimal system has no curl.
overview() { # PORT
  local reply
  exec 3<>"/dev/tcp/127.0.0.1/$1" || return
  printf 'GET /api/overview HTTP/1.0\r\nAuthorization: Basic Z3Vlc3Q6Z3Vlc3Q=\r\n\r\n' >&3
  read -r -t 5 -d '' reply <&3
  echo "$reply"
}
version_in() { sed -n 's/.*"rabbitmq_version":"\([^"]*\)".*/\1/p'; }

# A CA of our own, a certificate each for the node and a client, and a stranger's
# CA. Good for a day; -days is all that every openssl has.
write_certificates() {
  local dir=$data/tls name
  command -v openssl >/dev/null && mkdir -p "$dir" || return
  local new=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
  for name in ca other-ca; do
    openssl req -x509 "${new[@]}" -days 2 -subj "/CN=lapin-retry tests $name" \
      -addext 'keyUsage=critical,keyCertSign' -keyout "$dir/$name.key" -out "$dir/$name.pem" || return
  done
  for name in server client; do
    openssl req "${new[@]}" -subj "/CN=lapin-retry tests $name" -keyout "$dir/$name.key" -out "$dir/$name.csr" &&
      openssl x509 -req -days 2 -in "$dir/$name.csr" -CA "$dir/ca.pem" -CAkey "$dir/ca.key" -CAcreateserial \
        -extfile <(printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n') \
        -out "$dir/$name.pem" || return
  done
  chmod 644 "$dir"/*.key
}

# SEEN is the path of $data as the node sees it.
write_config() { # SEEN
  mkdir -p "$data/home" "$data/log"
  # The alarms are for machines that keep messages: here they would only stop
  # every publisher on a small or nearly full one.
  cat >"$data/rabbitmq.conf" <<END
listeners.tcp.1 = 127.0.0.1:$amqp
management.tcp.ip = 127.0.0.1
management.tcp.port = $management
disk_free_limit.absolute = 50MB
vm_memory_high_watermark.relative = 0.8
vm_memory_calculation_strategy = allocated
END
  certificates=
  write_certificates 2>/dev/null && certificates=$data/tls && cat >>"$data/rabbitmq.conf" <<END
listeners.ssl.1 = 127.0.0.1:$amqps
ssl_options.cacertfile = $1/tls/ca.pem
ssl_options.certfile = $1/tls/server.pem
ssl_options.keyfile = $1/tls/server.key
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
END
  echo '[{kernel, [{inet_dist_use_interface, {127,0,0,1}}]}].' >"$data/advanced.config"
  echo '[rabbitmq_management].' >"$data/enabled_plugins"
  # Everything that would otherwise come from /etc/rabbitmq or /var is named, so
  # that a node of the system neither shapes this one nor notices it.
  # RABBITMQ_ALLOW_INPUT has the start script exec the VM: one pid for both.
  settings=(
    HOME="$1/home" LANG=C.UTF-8 ERL_EPMD_PORT="$epmd" ERL_EPMD_ADDRESS=127.0.0.1
    RABBITMQ_NODENAME="$node_name" RABBITMQ_DIST_PORT="$dist"
    RABBITMQ_CONF_ENV_FILE="$1/none" RABBITMQ_CONFIG_FILE="$1/rabbitmq.conf"
    RABBITMQ_CONFIG_FILES="$1/none/*.conf" RABBITMQ_ADVANCED_CONFIG_FILE="$1/advanced.config"
    RABBITMQ_ENABLED_PLUGINS_FILE="$1/enabled_plugins" RABBITMQ_MNESIA_BASE="$1/db"
    RABBITMQ_LOG_BASE="$1/log" RABBITMQ_GENERATED_CONFIG_DIR="$1/generated"
    RABBITMQ_PLUGINS_EXPAND_DIR="$1/plugins" RABBITMQ_FEATURE_FLAGS_FILE="$1/feature_flags"
    RABBITMQ_PID_FILE="$1/pid" RABBITMQ_ALLOW_INPUT=1 RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-noinput
  )
}

# Starts the server. The node and its epmd become a process group of their own, out
# of Ctrl-C's reach, and die with this script even if that is killed outright (where
# setpriv can arrange it).
launch_node() {
  local tie=()
  command -v setpriv >/dev/null && tie=(setpriv --pdeathsig KILL)
  set -m
  # shellcheck disable=SC2016
  "${tie[@]+"${tie[@]}"}" "${enter[@]+"${enter[@]}"}" env -i PATH="$path" "${settings[@]}" /bin/sh -c '
    tie=$(command -v setpriv) && tie="$tie --pdeathsig KILL"
    $tie epmd -port "$ERL_EPMD_PORT" -address 127.0.0.1 &
    exec "$1"' sh "$server" </dev/null >>"$data/log/console" 2>&1 &
  node=$!
  disown
  set +m
}

# Waits until the node answers; fails if it ends before, or is still silent after two
# minutes.
await_node() {
  local i
  for ((i = 0; i < 600; i++)); do
    sleep 0.2
    alive "$node" || return
    # The node's name in the answer: the port could be another run's by now.
    version=$(overview "$management" 2>/dev/null | grep -F "\"$node_name\"" | version_in)
    [[ $version ]] && port_open "$amqp" && return
  done
  return 1
}

# Starts a node in $data, which is a folder below $root.
start_node() {
  local attempt
  for attempt in 1 2 3; do # another run may take a port between pick and use
    pick_ports
    node_name=lapin-retry-$$-$attempt@localhost
    write_config "${data#"$root"}"
    launch_node
    await_node && return
    tail -n 20 "$data/log/console" | cut -c 1-200 >"$data/why"
    kill_node
  done
  sed 's/^/    /' "$data/why" >&2
  stop_node
  return 1
}

# Its data is thrown away, so there is nothing to stop cleanly. The processes
# that Erlang puts into sessions of their own are known by their environment.
kill_node() {
  local i pids
  [[ $node ]] || return
  kill -KILL -- "-$node" 2>/dev/null
  for ((i = 0; i < 100; i++)); do
    pids=$(grep -lsF "RABBITMQ_NODENAME=$node_name" /proc/[0-9]*/environ | tr -dc '0-9\n')
    [[ $pids ]] || alive "$node" || break
    # shellcheck disable=SC2086
    kill -KILL $pids 2>/dev/null
    sleep 0.05
  done
  node=
}

stop_node() {
  kill_node
  [[ $data ]] && rm -rf "$data"
  data=
}

# ---------------------------------------------------------------- a server to run

find_installed() {
  server=$(command -v rabbitmq-server) || not_this 'no rabbitmq-server on the PATH' || return
  server=$(readlink -f "$server")
  # Packages put a wrapper on the PATH that turns root into the user rabbitmq,
  # who cannot write here, and turns everybody else away. Beside it, or in its
  # usual place, is the script it wraps.
  [[ $server == *-wrapper ]] && server=${server%/*}/rabbitmq-server
  [[ $server == /usr/sbin/* && -x /usr/lib/rabbitmq/bin/rabbitmq-server ]] &&
    server=/usr/lib/rabbitmq/bin/rabbitmq-server
  enter=() path=$PATH root=
}

# Whether a server can be unpacked here, and from which SUITES.
find_suites() {
  local tool distro
  [[ -r /etc/os-release ]] && distro=$(. /etc/os-release && echo "${ID:-} ${VERSION_CODENAME:-}")
  [[ ${distro:-} == @(debian|ubuntu)\ * ]] || not_this 'this is neither Debian nor Ubuntu' || return
  [[ $(id -u) == 0 ]] || not_this 'unpacking the package needs root' || return
  for tool in apt-get dpkg-deb chroot flock unshare; do
    command -v "$tool" >/dev/null || not_this "unpacking the package needs $tool" || return
  done
  case ${RABBITMQ:-} in
    3.10) suites=(bookworm) ;;
    4.0) suites=(trixie) ;;
    4.3) suites=(forky sid) ;;
    *) suites=("${distro#* }" trixie forky sid bookworm) ;;
  esac
  mkdir -p "$cache" && cache=$(cd "$cache" && pwd -P)
}

find_unpacked() { # SUITE
  run unpack "$1" || not_this "unpacking RabbitMQ${RABBITMQ:+ $RABBITMQ} from $1 failed" || return
  root=$cache/$1
  server=/usr/lib/rabbitmq/bin/rabbitmq-server path=/usr/sbin:/usr/bin:/sbin:/bin
  enter=(chroot "$root")
  # Where mounting is not allowed, as in most containers, the few devices that
  # the tree has of its own are enough.
  # shellcheck disable=SC2016
  if unshare --mount true 2>/dev/null; then
    enter=(unshare --mount --propagation private /bin/sh -ec '
      for dir in dev proc sys; do mount --rbind "/$dir" "$0/$dir"; done
      exec chroot "$0" "$@"' "$root")
  fi
}

# ---------------------------------------------------------------- unpacking

# One after the other, and moved into place when whole: neither two runs at once
# nor a run that is killed can leave half a tree there.
unpack() { # SUITE
  local suite=$1 base
  work=$cache/$1.new # not local: the EXIT trap needs it
  exec 9>"$cache/$suite.lock"
  flock -n 9 || { say 'waiting for another run that unpacks RabbitMQ'; flock 9; }
  if [[ ! -f $cache/$suite/.version ]]; then
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    for base in $(mirrors); do
      rm -rf "$work"
      private_apt "$work" "$base" "$suite" && fill_tree "$work" "$suite" &&
        mv "$work/tree" "$cache/$suite" && break
    done
  fi
  [[ -f $cache/$suite/.version && $(<"$cache/$suite/.version") == ${RABBITMQ:+"$RABBITMQ".}* ]]
}

# Where the host's own suite comes from. --print-uris works without package
# lists too, which a fresh system does not have.
mirrors() {
  local codename
  codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
  apt-get update --print-uris |
    sed -nE "s,^'(.*)/dists/($codename|oldstable|stable|testing|unstable|sid)/main/binary-.*,\1,p" | sort -u
}

# An apt that believes nothing to be installed, with the host's proxies and
# time-outs but none of its hooks. Told by APT_CONFIG, which is read first. Package
# lists past their date are good enough: mirrors that are frozen for builds to be
# repeatable have no others, and it is a broker for tests.
private_apt() { # DIR MIRROR SUITE
  local dir=$1 keyring
  keyring=/usr/share/keyrings/$(. /etc/os-release && echo "$ID")-archive-keyring.gpg
  mkdir -p "$dir"/{lists/partial,cache/archives/partial} && : >"$dir/status" || return
  echo "deb $([[ -f $keyring ]] && echo "[signed-by=$keyring]") $2 $3 main" >"$dir/sources.list"
  {
    apt-config dump | grep '^Acquire::' | grep -v '^Acquire::IndexTargets'
    cat <<END
Dir::Etc { Parts "/dev/null"; Main "/dev/null"; SourceList "$dir/sources.list"; SourceParts "/dev/null";
  Preferences "/dev/null"; PreferencesParts "/dev/null"; };
Dir::State::Lists "$dir/lists";
Dir::State::status "$dir/status";
Dir::State::extended_states "$dir/extended_states";
Dir::Cache "$dir/cache";
Dir::Log "$dir";
APT::Architectures { "$(dpkg --print-architecture)"; };
APT::Sandbox::User "root";
APT::Install-Recommends "false";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
END
  } >"$dir/apt.conf"
  export APT_CONFIG=$dir/apt.conf
  apt-get -qq update >&2
}

fill_tree() { # DIR SUITE
  local dir=$1 tree=$1/tree candidate deb
  candidate=$(apt-cache policy rabbitmq-server | sed -n 's/^ *Candidate: //p')
  [[ $candidate == [0-9]* && $candidate == ${RABBITMQ:+"$RABBITMQ".}* ]] ||
    { say "$2 has RabbitMQ ${candidate:-(none)}"; return 1; }
  say "downloading and unpacking RabbitMQ $candidate from $2"
  # The second line: what packages may rely on without saying so.
  apt-get -qq install --yes --download-only rabbitmq-server \
    dash bash coreutils sed grep mawk findutils hostname libc-bin util-linux >&2 || return
  mkdir -p "$tree"/{usr/{bin,sbin,lib,lib64},dev,proc,sys,tmp,root,etc} &&
    ln -s usr/{bin,sbin,lib,lib64} "$tree" || return
  for deb in "$dir"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$tree" --keep-directory-symlink \
      --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' || return
  done
  # What the packages' own scripts would have made.
  [[ -e $tree/bin/sh ]] || ln -s dash "$tree/bin/sh"
  [[ -e $tree/bin/awk ]] || ln -s mawk "$tree/bin/awk"
  echo 'root:x:0:0:root:/root:/bin/sh' >"$tree/etc/passwd"
  echo 'root:x:0:' >"$tree/etc/group"
  echo 'hosts: files' >"$tree/etc/nsswitch.conf"
  echo "127.0.0.1 localhost $(uname -n)" >"$tree/etc/hosts"
  mknod -m 666 "$tree/dev/null" c 1 3 && mknod -m 666 "$tree/dev/urandom" c 1 9
  chroot "$tree" /sbin/ldconfig && echo "${candidate%%-*}" >"$tree/.version"
}
