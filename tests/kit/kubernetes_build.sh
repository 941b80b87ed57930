#!/usr/bin/env bash
# Builds a Kubernetes API server (1.20.2) from Debian's source package, for tests/integration/scaling/test_kubernetes.py.
# Takes eight minutes on two cores and 4 GB of disk, of which 200 MB stay. Needs Debian 12, its packages jq, make, rsync.
#
#   tests/kit/kubernetes_build.sh [FOLDER]      default: ~/.cache/relaxd/kubernetes-1.20.2
set -euo pipefail
for tool in jq make rsync; do
  command -v "$tool" > /dev/null || { echo "$tool is missing: apt-get install jq make rsync" >&2; exit 1; }
done
target=$(realpath -m "${1:-$HOME/.cache/relaxd/kubernetes-1.20.2}")
work=$(mktemp -d "${TMPDIR:-/tmp}/kubernetes-XXXXXX")
trap 'chmod -R u+w "$work" && rm -rf "$work"' EXIT
cd "$work"

# Sources from a private copy of the machine's list, so that its own stays as it is.
mkdir -p lists/partial src home root reflect2
sed 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources > debian.sources
own=(-o "Dir::Etc::sourcelist=$work/debian.sources" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists")
apt-get "${own[@]}" update -q
apt-get "${own[@]}" source -q --download-only kubernetes
apt-get "${own[@]}" download -q golang-github-modern-go-reflect2-dev etcd-server golang-1.19-go golang-1.19-src
tar xzf kubernetes_*.orig.tar.gz -C src --strip-components=1
tar xJf kubernetes_*.debian.tar.xz -C src
for package in etcd-server golang-1.19-go golang-1.19-src; do dpkg -x ${package}_*.deb root; done

# With its own version of reflect2, the server dies at the first custom resource under Go 1.18 and later.
dpkg -x golang-github-modern-go-reflect2-dev_*.deb reflect2
reflect=src/vendor/github.com/modern-go/reflect2
rm -f $reflect/*.go $reflect/*.s
cp reflect2/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} $reflect/

printf '%s\n' "KUBE_GIT_COMMIT='debian'" "KUBE_GIT_TREE_STATE='archive'" "KUBE_GIT_VERSION='v1.20.2'" \
  "KUBE_GIT_MAJOR='1'" "KUBE_GIT_MINOR='20'" > version
cd src
mkdir -p .go/src/k8s.io && ln -sfn ../../.. .go/src/k8s.io/kubernetes
PATH=$work/root/usr/lib/go-1.19/bin:$PATH GOPATH=$PWD/.go GOCACHE=$work/gocache HOME=$work/home GOFLAGS= CGO_ENABLED=0 \
  KUBE_GIT_VERSION_FILE=$work/version make WHAT=cmd/kube-apiserver
mkdir -p "$target"
install _output/local/bin/linux/*/kube-apiserver "$work/root/usr/bin/etcd" "$target"
