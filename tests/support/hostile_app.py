"""Listen on a port inside a sandbox, report the received requests, and answer as maliciously as possible."""

import base64
import hashlib
import json
import socket
import threading

HEADERS = [
    "Content-Type: text/html",
    "Set-Cookie: a=b",
    'Clear-Site-Data: "*"',
    "X-Accel-Redirect: /etc/passwd",
    "Strict-Transport-Security: max-age=9",
    "Service-Worker-Allowed: /",
    "Access-Control-Allow-Origin: http://x",
    "WWW-Authenticate: Basic",
    "Content-Security-Policy: none",
    "X-Frame-Options: ALLOWALL",
]


def serve(port, handle):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen(50)
    while True:
        threading.Thread(target=run, args=(handle, server.accept()[0]), daemon=True).start()


def run(handle, sock):
    with sock, sock.makefile("rb") as file:
        try:
            handle(sock, file)
        except (OSError, ValueError, IndexError):
            pass


def read(file):
    method, target, _ = file.readline().decode().split()
    headers = {}
    while line := file.readline().strip():
        name, _, value = line.decode("latin-1").partition(": ")
        headers[name.lower()] = value
    return method, target, headers


def body(file, headers):
    if headers.get("transfer-encoding") == "chunked":
        data = b""
        while size := int(file.readline(), 16):
            data += file.read(size)
            file.readline()
        return data
    return file.read(int(headers.get("content-length", 0)))


def app(sock, file):
    method, target, headers = read(file)
    if "upgrade" in headers:
        word = headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(word.encode()).digest()).decode()
        head = f"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n"
        sock.sendall(head.encode() + b"Set-Cookie: a=b\r\n\r\n")
        while head := file.read(2):
            mask, data = file.read(4), file.read(head[1] & 127)
            data = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
            sock.sendall(bytes([head[0], len(data)]) + data)
        return
    data = body(file, headers)
    if target == "/chunks":
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        file.read(1)
    elif target == "/slow":
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        print("hung up" if not file.read(1) else "", flush=True)
    elif target == "/short":
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort")
    elif target == "/long":
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\nsmuggled")
    elif target == "/both":
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    elif target == "/loose":
        sock.sendall(
            b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n3  \r\nhel\r\n2;x=y\r\nlo\r\n0\r\nX: y\r\n\r\nmore"
        )
    elif target == "/huge":
        sock.sendall(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n")
    elif target == "/noise":
        sock.sendall(b"\x00\xff noise\r\n\r\n")
    elif target.startswith("/go?"):
        sock.sendall(f"HTTP/1.1 302 Found\r\nLocation: {target[4:]}\r\nContent-Length: 0\r\n\r\n".encode())
    elif target == "/big":
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + b"b" * 5_000_000)
    else:
        digest = hashlib.sha256(data).hexdigest()
        told = {"method": method, "target": target, "headers": headers, "size": len(data), "hash": digest}
        text = json.dumps(told).encode()
        head = "HTTP/1.1 207 Well\r\n" + "\r\n".join(HEADERS) + f"\r\nContent-Length: {len(text)}\r\n\r\n"
        sock.sendall(head.encode() + (b"" if method == "HEAD" else text))


threading.Thread(target=serve, args=(7002, app), daemon=True).start()
serve(7001, app)
