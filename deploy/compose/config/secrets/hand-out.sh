#!/bin/sh
# Gives each service its own secrets and no others: copies them from the folder ALL into a folder with the service's
# name in TO. Which services there are is which folders there are.
#
#   hand-out.sh ALL TO
#
# Each file belongs to whom it is for: 10001 is relaxd's user in its images, 472 Grafana's.
set -eu
umask 077
all=$1
cd "$2"
for service in *; do
    owner=10001
    case $service in
        redis) files=redis_password owner=redis ;;
        grafana) files=grafana_password owner=472 ;;
        cli) files=admin.token ;;
        console) files=read.token ;; # people who look give their own
        judge) files="tokens judge.token" ;;
        launcher) files="tokens redis_password" ;; # it calls nobody
        *) files="tokens redis_password $service.token" ;;
    esac
    for file in $files; do
        case $file in *.token) name=token ;; *) name=$file ;; esac
        cp "$all/$file" "$service/$name.new"
        chown "$owner" "$service/$name.new"
        chmod 400 "$service/$name.new"
        mv "$service/$name.new" "$service/$name"
    done
done
