#!/bin/sh
# Makes a CA of your own, and certificates by it, for TLS between relaxd's services. Needs openssl.
#
#   deploy/certificates.sh FOLDER [NAME-OR-ADDRESS]...
#
# FOLDER gets, for `--tls-...` and RELAXD_TLS_...:
#   ca.crt            whom to trust: RELAXD_TLS_CA, and RELAXD_TLS_CLIENT_CA for mutual TLS
#   ca.key            makes certificates: keep it away from the machines that run services
#   service.crt service.key  for the services (RELAXD_TLS_CERTIFICATE, RELAXD_TLS_KEY): for the names relaxd and localhost,
#                            127.0.0.1, and the names and addresses given
#   person.crt person.key    for the command line, where clients need a certificate; no server can use it
#
# Run it again to renew: the CA stays, the certificates are made anew. DAYS (365) says how long they are valid.
set -eu
umask 077
folder=${1:?"usage: $0 FOLDER [NAME-OR-ADDRESS]..."}
shift
mkdir -p "$folder"
cd "$folder"

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2> /dev/null; }

if [ ! -s ca.crt ]; then
    new_key ca.key
    openssl req -x509 -new -key ca.key -days 3650 -subj "/CN=relaxd CA" -out ca.crt \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
fi

issue() { # name of the files, extended key usage, subject alternative names
    new_key "$1.key.new"
    printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=%s\nsubjectAltName=%s\n' \
        "$2" "$3" > extensions
    openssl req -new -key "$1.key.new" -subj "/CN=relaxd $1" -out request
    openssl x509 -req -in request -CA ca.crt -CAkey ca.key -CAcreateserial -days "${DAYS:-365}" \
        -extfile extensions -out "$1.crt.new" 2> /dev/null
    mv "$1.key.new" "$1.key"
    mv "$1.crt.new" "$1.crt"
    rm -f request extensions
}

names=DNS:relaxd,DNS:localhost,IP:127.0.0.1
for name in "$@"; do
    case $name in
        *[!0-9.]*) case $name in *:*) names=$names,IP:$name ;; *) names=$names,DNS:$name ;; esac ;;
        *) names=$names,IP:$name ;;
    esac
done
issue service serverAuth,clientAuth "$names"
issue person clientAuth DNS:person
chmod 644 ca.crt service.crt person.crt
echo "$folder: certificates for $names, valid for ${DAYS:-365} days"
