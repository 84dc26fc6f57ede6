#!/bin/sh
# What `make install` does on a running machine after the files are in place.
set -eu

if ! getent group kiri >/dev/null; then
	groupadd --system kiri
fi
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	# A running engine goes on with its old program; its containers would survive a restart, but that is not for make to decide.
	echo "Installed. Start it with: systemctl enable --now kiri.socket"
else
	echo "Installed. There is no systemd here; start the engine with: kiri daemon --system"
fi
echo "Users of the engine belong in the group kiri: usermod -aG kiri NAME"
