#!/bin/sh
# Writes the secrets that the compose files use into a folder: copies of those in GIVEN, random ones where there are none.
#
#   deploy/secrets.sh FOLDER [GIVEN]
#
# ROLE.token     the token of each role's service; admin.token for people, read.token for who only looks
# tokens         whose these are, by SHA-256: what every service accepts (docs/security.md, "Tokens")
# *_password     of Redis and of Grafana
#
# `make secrets` runs it, and so do `relaxd up --compose` and the service `secrets` of compose.yaml.
set -eu
umask 077
shortest=16
roles="admin read coordinator trainer ranks rollout reward advantage reference teacher critic judge agent"
folder=${1:?"usage: $0 FOLDER [GIVEN]"}
given=${2:+$(cd "$2" && pwd)}
mkdir -p "$folder"
cd "$folder"

sha256() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d ' ' -f 1; }

put() { # NAME TEXT
    printf '%s\n' "$2" > "$1.new"
    mv "$1.new" "$1"
}

changed=
for name in redis_password grafana_password $(printf '%s.token ' $roles); do
    if [ -n "$given" ] && [ -e "$given/$name" ]; then
        secret=$(cat "$given/$name")
        if [ ${#secret} -lt $shortest ]; then
            echo "$name is ${#secret} characters long: it must have $shortest or more. \`make secrets\` writes random ones" >&2
            exit 1
        fi
        echo "$name: copied"
    elif [ ! -s "$name" ]; then
        secret=$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')
        echo "$name: made"
    else
        continue
    fi
    put "$name" "$secret"
    changed=yes
done

if [ -n "$given" ] && [ -e "$given/tokens" ]; then
    put tokens "$(cat "$given/tokens")"
    echo "tokens: copied"
elif [ -n "$changed" ] || [ ! -s tokens ]; then
    put tokens "$(for role in $roles; do
        echo "$role $role sha256:$(tr -d '\n' < "$role.token" | sha256)"
    done)"
    echo "tokens: made"
fi
