#!/bin/sh
# Makes the certificates of the tests again. The keys protect nothing: they are for servers on loopback.
# By `openssl ca`, because it alone lets a certificate begin before today, on machines whose clock is behind.
set -eu
cd "$(dirname "$0")"
mkdir work
trap 'rm -rf work' EXIT
cat >work/ca.cnf <<END
[ca]
default_ca = any
[any]
database = work/index.txt
new_certs_dir = work
rand_serial = yes
default_md = sha256
default_startdate = 20200101000000Z
default_enddate = 21200101000000Z
policy = policy
unique_subject = no
[policy]
commonName = supplied
[root]
basicConstraints = critical, CA:true
subjectKeyIdentifier = hash
[leaf]
subjectAltName = DNS:localhost, IP:127.0.0.1
END
: >work/index.txt

key() { # file
    openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"
}

authority() { # name
    key "work/$1.key"
    openssl req -new -key "work/$1.key" -subj "/CN=$1" -out work/request.pem
    openssl ca -batch -notext -config work/ca.cnf -selfsign -keyfile "work/$1.key" -extensions root \
        -in work/request.pem -out "$1.pem"
}

signed() { # name, authority
    key "$1.key"
    openssl req -new -key "$1.key" -subj "/CN=$1" -out work/request.pem
    openssl ca -batch -notext -config work/ca.cnf -cert "$2.pem" -keyfile "work/$2.key" -extensions leaf \
        -in work/request.pem -out "$1.pem"
}

authority root
authority stranger_root
signed server root
signed client root
signed stranger stranger_root
openssl pkcs8 -topk8 -in server.key -passout pass:secret -out server_encrypted.key
