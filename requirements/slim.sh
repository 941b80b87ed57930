#!/bin/sh
# Take out of the packages in a folder what no image needs: their tests, and files for compiling against them.
set -eu
find "$1" -type d \( -name tests -o -name include \) -path '*/site-packages/*' -prune -exec rm -rf {} +
find "$1" \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.a' \) -path '*/site-packages/*' -delete
