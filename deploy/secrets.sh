#!/bin/sh
# Writes the secrets that the compose files use into a folder: copies of those in GIVEN, random ones where there are none.
#
#   deploy/secrets.sh FOLDER [GIVEN]
#
# `make secrets` runs it, and so does the service `secrets` of compose.yaml.
set -eu
umask 077
shortest=16
folder=${1:?"usage: $0 FOLDER [GIVEN]"}
given=${2:+$(cd "$2" && pwd)}
mkdir -p "$folder"
cd "$folder"
for name in redis_password token grafana_password; do
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
    printf '%s\n' "$secret" > "$name.new"
    mv "$name.new" "$name"
done
