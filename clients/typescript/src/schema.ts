// Made by scripts/make_types.py from the OpenAPI document: change the API, and run `npm run generate`.

export interface paths {
    "/health": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Tell whether sandboxes can be started here */
        get: operations["get_health"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/tools": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List the tools that a sandbox's `tools` can name */
        get: operations["list_tools"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/openapi.json": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Answer this API's description in OpenAPI 3.1 */
        get: operations["get_openapi"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/audit": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List the audit log of all sandboxes; for those whom `Policy.admins` names, or the server's own user */
        get: operations["get_audit"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/audit/export": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Export the audit log of all sandboxes as JSON lines: all rows that fit, oldest first */
        get: operations["export_audit"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/audit/verify": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Check by its hashes that the audit log holds what was written; for administrators
         * @description Keep `head` where nobody who writes the log can write, and give it to a later check: without it, a log that was written anew as a whole cannot be told from the true one.
         */
        get: operations["verify_audit"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/code": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Run code in a persistent kernel, and answer what came of it
         * @description Variables stay for the next run. In a notebook's sandbox the code runs in the notebook's own kernel, so that a person and an agent share variables. A caller who goes away interrupts its run, unless `keep_running` is set. The end of the kernel is an answer too, with its cause.
         */
        post: operations["run_code"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/code/stream": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Run code and tell its outputs as they come, as server-sent events; the last is `done` */
        post: operations["stream_code"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/contexts": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List the kernels of a sandbox */
        get: operations["list_contexts"];
        put?: never;
        /** Start a kernel before it is needed; one that is there stays as it is */
        post: operations["create_context"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/contexts/{context}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        post?: never;
        /** End a kernel and forget its variables */
        delete: operations["delete_context"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/contexts/{context}/restart": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Start a kernel anew */
        post: operations["restart_context"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/contexts/{context}/interrupt": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Interrupt what a kernel runs, whoever sent it */
        post: operations["interrupt_context"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/exec": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Run a command to its end
         * @description When its time is over it is killed with all that it started, and what it printed so far comes back. A caller who goes away ends it too.
         */
        post: operations["run_command"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/exec/stream": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Run a command and tell what it prints as it happens, as server-sent events
         * @description Events are `stdout`, `stderr` and at last `exit`; `failure` if it could not go on. A slow reader holds it up.
         */
        post: operations["stream_command"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/processes": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List background processes and terminals */
        get: operations["list_processes"];
        put?: never;
        /**
         * Start a command in the background
         * @description It goes on when its caller goes away, and does not keep the sandbox from being idle.
         */
        post: operations["start_process"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/processes/{process}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Describe a background process */
        get: operations["get_process"];
        put?: never;
        post?: never;
        /** Kill a background process, and forget it and what it printed */
        delete: operations["remove_process"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/processes/{process}/output": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Read what a background process printed, from an offset on */
        get: operations["read_output"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/processes/{process}/follow": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Tell what a background process prints as it happens, as server-sent events */
        get: operations["follow_process"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/processes/{process}/stdin": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Write to the input of a background process, or close it */
        post: operations["write_stdin"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/processes/{process}/signal": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Send a signal to the process group of a background process */
        post: operations["signal_process"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/processes/{process}/kill": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Kill a background process with all that it started */
        post: operations["kill_process"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/processes/{process}/size": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Set the size of a terminal */
        post: operations["resize_terminal"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/processes/{process}/wait": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Wait for the end of a background process; when the time is over it is described as it is */
        get: operations["wait_process"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/terminals": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Open a terminal. It is a background process too, and is used over its websocket
         * @description The websocket is `/sandboxes/{id}/terminals/{process}/socket`. Frames with bytes are what is typed and what is shown; frames with text are JSON: `{"rows": 24, "columns": 80}` sets the size, and `{"exit_code": 0}` is the end. A client may leave and come back.
         */
        post: operations["open_terminal"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/content": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Read a file, or a part of it, of up to 16 MiB */
        get: operations["read_file"];
        /**
         * Write a whole file, which appears in one step
         * @description For files of any size there is the upload.
         */
        put: operations["write_file"];
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/append": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Add to the end of a file, or make it */
        post: operations["append_file"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/edit": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Replace a text in a file; it must be there once, unless told otherwise */
        post: operations["edit_file"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/stat": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Tell what an entry is */
        get: operations["stat_file"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/exists": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Tell whether there is such an entry */
        get: operations["file_exists"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List a directory, or all beneath it */
        get: operations["list_files"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/glob": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Find entries by a pattern of their paths */
        get: operations["glob_files"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/grep": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Find lines by a pattern, in one file or in all beneath a directory */
        get: operations["grep_files"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/mkdir": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Make a directory */
        post: operations["make_directory"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/move": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Give an entry another path */
        post: operations["move_file"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/copy": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Copy a file, or a directory with all beneath it */
        post: operations["copy_file"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/delete": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Delete an entry, and with `recursive` all beneath it */
        post: operations["delete_file"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/download": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Download a file of any size, or with a `Range` header a part of it
         * @description With `digest` it is read once before, and the header `Content-Digest` says what SHA-256 must come.
         */
        get: operations["download_file"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/upload": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        /**
         * Upload a file of any size: the body is its bytes
         * @description It appears when all of it has come and is what `size` and `sha256` say, and not before.
         */
        put: operations["upload_file"];
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/archive": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Download a directory as a tar or zip archive */
        get: operations["download_archive"];
        /** Upload an archive (tar, tar.gz or zip) to be unpacked into a directory */
        put: operations["upload_archive"];
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/import": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Copy files from another sandbox, or from a folder of the host that policy names */
        post: operations["import_files"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/files/export": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Copy files to a folder of the host that policy names */
        post: operations["export_files"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/packages": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Install packages, and answer when that is done
         * @description An installation that fails is an answer too: `is_ok` is false, and `message` says why. Indexes are those of the package managers' own configuration, reached through the gate; what the gate refused is in `refused`.
         */
        post: operations["install_packages"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/packages/stream": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Install packages and tell the progress as server-sent events, at last the `result` */
        post: operations["stream_installation"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List the caller's sandboxes, and those of this server's notebooks */
        get: operations["list_sandboxes"];
        put?: never;
        /**
         * Make a sandbox, and answer when it is ready
         * @description With an `id` of the caller's own, asking again in the same words answers the sandbox that is there, with status 200; asking for something else under that id is a conflict. A caller who goes away before the answer leaves nothing behind, unless it chose an id to ask again by.
         */
        post: operations["create_sandbox"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Describe a sandbox: its state, and of an ended one the cause
         * @description Looking does not count as use.
         */
        get: operations["get_sandbox"];
        put?: never;
        post?: never;
        /** End a sandbox and forget it */
        delete: operations["delete_sandbox"];
        options?: never;
        head?: never;
        /**
         * Change what a living sandbox may reach, how long it lives, or its labels
         * @description What is narrowed holds at once: connections that are no longer allowed are cut. Nothing can be made wider than the profile has it.
         */
        patch: operations["patch_sandbox"];
        trace?: never;
    };
    "/sandboxes/{id}/revive": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Start a sandbox again that ran out of memory or disk, or crashed, with the files of its workspace
         * @description It keeps its id, its tokens and its terms, as far as policy allows them now. What was in memory is lost, and so is everything outside of the workspace. Possible until `end.kept_until`; does nothing to a sandbox that runs.
         */
        post: operations["revive_sandbox"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/egress": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Tell what a sandbox may reach, and what it could be given */
        get: operations["get_egress"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/egress/log": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List the gate's decisions about a sandbox */
        get: operations["get_egress_log"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/egress/asks": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List the hosts that were asked for in a sandbox */
        get: operations["list_asks"];
        put?: never;
        /**
         * Ask for a host: it is pending until a person decides
         * @description A host that no person may allow, since the profile does not cover it, is refused at once.
         */
        post: operations["ask_host"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/egress/asks/{ask}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Tell what became of a host that was asked for */
        get: operations["get_ask"];
        put?: never;
        /** Allow or deny a host that was asked for */
        post: operations["decide_ask"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/egress/asks": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List all hosts that wait for a person's decision, over all sandboxes that the caller sees */
        get: operations["list_pending_asks"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/http": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Send one HTTP request through the sandbox's egress gate, as if it came from inside
         * @description The gate decides and logs as it does for any program inside; certificates are verified; redirects are not followed.
         */
        post: operations["http_request"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/audit": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List what the audit log has of a sandbox */
        get: operations["get_sandbox_audit"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/audit/export": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Export all that the audit log has of a sandbox, as JSON lines, oldest first */
        get: operations["export_sandbox_audit"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/snapshots": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List the snapshots of a sandbox, oldest first */
        get: operations["list_snapshots"];
        put?: never;
        /**
         * Save a sandbox as it is, while it goes on: memory, kernels and all, and what was written
         * @description A folder of the user's that is shown at the workspace is not part of it. Open connections are not kept.
         */
        post: operations["take_snapshot"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/restore": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Take a sandbox back to one of its snapshots: undo
         * @description Its id, its kernels' ids and endpoints stay; a notebook goes on with the variables of then. Tokens for it stay as they are now. What policy does not allow any more is not restored.
         */
        post: operations["restore_sandbox"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/fork": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Start another sandbox off a snapshot, or off a sandbox as it is now
         * @description It has its own id, grant and audit, and whoever forked it owns it. What ran goes on in both. With `as_kernel` it is that of a new Jupyter kernel, whose id is that of the answer's first kernel.
         */
        post: operations["fork_sandbox"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/snapshots": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List all snapshots of the caller's, oldest first */
        get: operations["list_all_snapshots"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/snapshots/import": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Import an exported snapshot: the body is the file
         * @description It becomes the caller's. Of another machine's it takes one that has the same key file.
         */
        post: operations["import_snapshot"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/snapshots/{snapshot}/export": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Export a snapshot as one file
         * @description It holds all that the sandbox had in memory, secrets too: keep it as private.
         */
        get: operations["export_snapshot"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/snapshots/{snapshot}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Describe a snapshot */
        get: operations["get_snapshot"];
        put?: never;
        post?: never;
        /** Remove a snapshot. Others that share pages with it stay whole */
        delete: operations["delete_snapshot"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/park": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Save a sandbox to the disk, and free its memory. Its next use wakes it, and takes a little longer */
        post: operations["park_sandbox"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/wake": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Wake a parked sandbox before its next use; does nothing to another */
        post: operations["wake_sandbox"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/tokens": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List the tokens for this sandbox that are good. Their texts are kept nowhere */
        get: operations["list_tokens"];
        put?: never;
        /**
         * Make a token for this sandbox, so that an agent never holds the server's own
         * @description It ends with the sandbox. Its maker can give no right that it does not have itself.
         */
        post: operations["create_token"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/tokens/{token}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        post?: never;
        /** Revoke a token, at once and everywhere. Calls that were made with it and still run end in seconds */
        delete: operations["revoke_token"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/terminals/{process}/socket": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Connect to a terminal by a websocket
         * @description Frames with bytes are what is typed and what is shown. Frames with text are JSON: `{rows, columns}` sets the size, `{exit_code}` is the last one. A browser offers the subprotocols `agentbox` and its token.
         */
        get: operations["connect_terminal"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sandboxes/{id}/ports/{port}/{path}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Send a request to a program that listens on a port of the sandbox
         * @description Any path, query and body, and websockets. The answer is the program's own, or an error of this API.
         */
        get: operations["get_port"];
        /**
         * Send a request to a program that listens on a port of the sandbox
         * @description Any path, query and body, and websockets. The answer is the program's own, or an error of this API.
         */
        put: operations["put_port"];
        /**
         * Send a request to a program that listens on a port of the sandbox
         * @description Any path, query and body, and websockets. The answer is the program's own, or an error of this API.
         */
        post: operations["post_port"];
        /**
         * Send a request to a program that listens on a port of the sandbox
         * @description Any path, query and body, and websockets. The answer is the program's own, or an error of this API.
         */
        delete: operations["delete_port"];
        /**
         * Send a request to a program that listens on a port of the sandbox
         * @description Any path, query and body, and websockets. The answer is the program's own, or an error of this API.
         */
        options: operations["options_port"];
        /**
         * Send a request to a program that listens on a port of the sandbox
         * @description Any path, query and body, and websockets. The answer is the program's own, or an error of this API.
         */
        head: operations["head_port"];
        /**
         * Send a request to a program that listens on a port of the sandbox
         * @description Any path, query and body, and websockets. The answer is the program's own, or an error of this API.
         */
        patch: operations["patch_port"];
        trace?: never;
    };
}
export type webhooks = Record<string, never>;
export interface components {
    schemas: {
        /**
         * ErrorAnswer
         * @description Every answer that is an error.
         */
        ErrorAnswer: {
            /** @description A sentence for a person. */
            message: string;
            /** @description One word for a program, such as `not_found`. */
            reason: string;
            /**
             * @description The field of the request that is at fault.
             * @default null
             */
            field?: string | null;
            /**
             * @description The administrator's setting that would change it.
             * @default null
             */
            setting?: string | null;
        };
        /**
         * Health
         * @description Whether sandboxes can be started here.
         */
        Health: {
            /**
             * @description `ok`, or `degraded` with a check that says why.
             * @enum {unknown}
             */
            status: "degraded" | "ok";
            version: string;
            runtime: string;
            /** @enum {unknown} */
            isolation: "gvisor" | "none";
            /** @description That live in this server. */
            sandboxes: number;
            checks: components["schemas"]["CheckInfo"][];
        };
        /**
         * CheckInfo
         * @description One thing that was looked at.
         */
        CheckInfo: {
            name: string;
            is_ok: boolean;
            message: string;
        };
        /**
         * ToolList
         * @description All tools there are.
         */
        ToolList: {
            tools: components["schemas"]["ToolInfo"][];
        };
        /**
         * ToolInfo
         * @description A tool that sessions can allow.
         */
        ToolInfo: {
            name: string;
            description: string;
        };
        /**
         * AuditRows
         * @description Rows, oldest first.
         */
        AuditRows: {
            rows: components["schemas"]["AuditItem"][];
        };
        /**
         * AuditItem
         * @description A row of the audit log; see the page on it.
         */
        AuditItem: {
            id: number;
            time: number;
            sandbox: string;
            kind: string;
            is_allowed: boolean | null;
            host: string | null;
            port: number | null;
            rule: string | null;
            reason: string | null;
            bytes_up: number | null;
            bytes_down: number | null;
            duration: number | null;
            detail: Record<string, unknown>;
            hash: string;
        };
        /**
         * AuditVerification
         * @description What the check of the audit log has found.
         */
        AuditVerification: {
            is_ok: boolean;
            /** @description Rows that fit, and those that were dropped since the log was full. */
            rows: number;
            /** @description Rows that fit, and those that were dropped since the log was full. */
            dropped: number;
            /** @description Number and hash of the last row that fits, to be kept elsewhere. */
            head: string;
            /** @description The first row that is broken or missing. */
            row: number | null;
            /** @description A sentence on it. */
            problem: string | null;
        };
        /**
         * CodeRequest
         * @description Code for a persistent kernel.
         */
        CodeRequest: {
            /** @description What to run. */
            code: string;
            /**
             * @description Letters, digits, `.`, `_`, `-`.
             * @default default
             */
            context?: string;
            /**
             * @description What the code is written in: `python`, and others where the sandbox has their kernels. A context runs one language. Without a context, languages other than Python have one of their own, called by their kernel.
             * @default null
             */
            language?: string | null;
            /**
             * @description Seconds until it is interrupted; null for none.
             * @default 60
             */
            timeout?: number | null;
            /**
             * @description Bytes kept of stdout and of stderr, and of all displays together.
             * @default 1048576
             */
            stream_bytes?: number;
            /**
             * @description Bytes kept of stdout and of stderr, and of all displays together.
             * @default 10485760
             */
            display_bytes?: number;
            /**
             * @description Displays kept.
             * @default 1000
             */
            displays?: number;
            /**
             * @description Let it run on when the caller goes away, instead of interrupting it.
             * @default false
             */
            keep_running?: boolean;
        };
        /**
         * CodeResult
         * @description What one run of code came to.
         */
        CodeResult: {
            /**
             * @description ``ok``; ``error``, it raised; ``interrupted``; ``timed_out``; ``kernel_died``.
             * @enum {unknown}
             */
            status: "error" | "interrupted" | "kernel_died" | "ok" | "timed_out";
            /**
             * @description What is left of them after ``clear_output``.
             * @default
             */
            stdout?: string;
            /**
             * @description What is left of them after ``clear_output``.
             * @default
             */
            stderr?: string;
            /**
             * @description The last expression's value.
             * @default null
             */
            result?: components["schemas"]["Display"] | null;
            /**
             * @description In order, each in its latest version.
             * @default []
             */
            displays?: components["schemas"]["Display"][];
            /** @default null */
            error?: components["schemas"]["CodeError"] | null;
            /** @default null */
            execution_count?: number | null;
            /**
             * @description Seconds from sending the code to the end, or to giving up.
             * @default 0
             */
            duration?: number;
            /**
             * @description Something was left out, by a limit.
             * @default false
             */
            truncated?: boolean;
            /**
             * @default {
             *       "stdout": 0,
             *       "stderr": 0,
             *       "displays": 0
             *     }
             */
            total_bytes?: components["schemas"]["TotalBytes"];
            /**
             * @description The kernel began to run it. False when other code kept the kernel busy for all the time there was.
             * @default true
             */
            has_started?: boolean;
            /**
             * @description It still runs: it did not heed the interrupt.
             * @default false
             */
            is_busy?: boolean;
            /**
             * @description Why the kernel is gone.
             * @default null
             */
            end?: components["schemas"]["End"] | null;
            /**
             * @description A sentence for a person, where the status does not say it all.
             * @default null
             */
            message?: string | null;
            /**
             * @description The context's name.
             * @default default
             */
            context?: string;
            /**
             * @description Counts the context's kernels; when it has changed, variables are gone.
             * @default 0
             */
            epoch?: number;
        };
        /**
         * Display
         * @description One MIME bundle.
         */
        Display: {
            /** @description By MIME type: a str, which is base64 for binary types as in notebooks; for JSON types a ``msgspec.Raw`` with the JSON text (``msgspec.json.decode`` reads it, encoding writes it as it is). */
            data: Record<string, unknown>;
            /**
             * @description As the kernel gave it, of ``msgspec.Raw``.
             * @default {}
             */
            metadata?: Record<string, unknown>;
            /**
             * @description What later updates name it by.
             * @default null
             */
            display_id?: string | null;
        };
        /**
         * CodeError
         * @description An exception: its class, its text, and the traceback's lines with terminal colours, as Jupyter has them.
         */
        CodeError: {
            ename: string;
            evalue: string;
            /** @default [] */
            traceback?: string[];
        };
        /**
         * TotalBytes
         * @description How much there was, kept or not, what was cleared included.
         */
        TotalBytes: {
            /** @default 0 */
            stdout?: number;
            /** @default 0 */
            stderr?: number;
            /** @default 0 */
            displays?: number;
        };
        /**
         * End
         * @description How a sandbox or its kernel ended.
         */
        End: {
            /** @description The reason. */
            cause: components["schemas"]["Cause"];
            /** @description 0 to 255; 128 + n after signal n, 137 after the memory limit. */
            exit_code: number;
            /** @description A sentence for a person, such as ``out of memory (limit 512 MiB)``. It is one printable line, even if parts of it come from inside the sandbox. */
            message: string;
            /**
             * @description The setting that would have prevented this end.
             * @default null
             */
            setting?: string | null;
        };
        /**
         * Cause
         * @description The reason why a sandbox or its kernel ended.
         * @enum {unknown}
         */
        Cause: "crashed" | "disk_full" | "exited" | "idle" | "killed" | "lease_over" | "life_over" | "lost" | "out_of_memory" | "runtime_failed" | "stopped";
        /**
         * StreamEvent
         * @description More text on stdout or stderr.
         */
        StreamEvent: {
            /** @enum {unknown} */
            event: "stream";
            /** @enum {unknown} */
            name: "stderr" | "stdout";
            text: string;
        };
        /**
         * DisplayEvent
         * @description A display, or the new version of the one with its ``display_id``.
         */
        DisplayEvent: {
            /** @enum {unknown} */
            event: "display";
            display: components["schemas"]["Display"];
            /** @default false */
            is_update?: boolean;
        };
        /**
         * ResultEvent
         * @description The last expression's value.
         */
        ResultEvent: {
            /** @enum {unknown} */
            event: "result";
            display: components["schemas"]["Display"];
        };
        /**
         * ClearEvent
         * @description All that came before is to be taken off the page.
         */
        ClearEvent: {
            /** @enum {unknown} */
            event: "clear";
        };
        /**
         * ErrorEvent
         * @description The code raised.
         */
        ErrorEvent: {
            /** @enum {unknown} */
            event: "error";
            error: components["schemas"]["CodeError"];
        };
        /**
         * DoneEvent
         * @description The last event of every run.
         */
        DoneEvent: {
            /** @enum {unknown} */
            event: "done";
            result: components["schemas"]["CodeResult"];
        };
        /**
         * ContextList
         * @description The kernels of a sandbox.
         */
        ContextList: {
            contexts: components["schemas"]["ContextInfo"][];
        };
        /**
         * ContextInfo
         * @description A context as others see it.
         */
        ContextInfo: {
            name: string;
            language: string;
            /**
             * @description ``starting``, ``idle``, ``busy`` or ``dead``; the next run in a dead one starts a new kernel.
             * @enum {unknown}
             */
            state: "busy" | "dead" | "idle" | "starting";
            /** @description Counts its kernels. */
            epoch: number;
            /**
             * @description It is the kernel of an open notebook.
             * @default false
             */
            is_notebook?: boolean;
            /**
             * @description How a dead one ended.
             * @default null
             */
            end?: components["schemas"]["End"] | null;
        };
        /**
         * ContextRequest
         * @description A kernel to start before it is needed.
         */
        ContextRequest: {
            /**
             * @description Letters, digits, `.`, `_`, `-`.
             * @default default
             */
            name?: string;
            /** @default null */
            language?: string | null;
        };
        /**
         * ExecRequest
         * @description A command: `command` for the shell, or `argv` for a program without one.
         */
        ExecRequest: {
            /**
             * @description A line for the shell.
             * @default null
             */
            command?: string | null;
            /**
             * @description A program and its arguments.
             * @default null
             */
            argv?: string[] | null;
            /**
             * @description Where it starts; the sandbox's own unless given.
             * @default null
             */
            workdir?: string | null;
            /**
             * @description More variables.
             * @default {}
             */
            env?: {
                [key: string]: string;
            };
            /**
             * @description What it can read.
             * @default
             */
            stdin?: string;
            /**
             * @description The same for what is no text.
             * @default
             */
            stdin_base64?: string;
            /**
             * @description `root` where the profile allows it.
             * @default user
             * @enum {unknown}
             */
            user?: "root" | "user";
            /**
             * @description Seconds, after which it is killed with all that it started; what it printed comes back.
             * @default 30
             */
            timeout?: number;
            /**
             * @description Bytes kept of each output.
             * @default 10485760
             */
            max_output?: number;
            /**
             * @description How output is written in the answer. In `utf-8`, other bytes become U+FFFD.
             * @default utf-8
             * @enum {unknown}
             */
            encoding?: "base64" | "utf-8";
        };
        /**
         * ExecAnswer
         * @description What a command gave.
         */
        ExecAnswer: {
            stdout: string;
            stderr: string;
            /** @description 128 + n after signal n; 127 if there is no such program. */
            exit_code: number;
            /** @description It was killed since its time was over. */
            timed_out: boolean;
            /** @description It printed more than is here; how much, `stdout_bytes` and `stderr_bytes` tell. */
            truncated: boolean;
            stdout_bytes: number;
            stderr_bytes: number;
            /** @description Seconds. */
            duration: number;
            /** @enum {unknown} */
            encoding: "base64" | "utf-8";
            /** @description What the gate refused to the sandbox meanwhile. */
            refused: components["schemas"]["RefusedHost"][];
        };
        /**
         * RefusedHost
         * @description A connection that the gate did not let through.
         */
        RefusedHost: {
            host: string;
            port: number;
            message: string;
        };
        /**
         * OutputEvent
         * @description Something was printed; `offset` is that of its first byte.
         */
        OutputEvent: {
            text: string;
            offset: number;
        };
        /**
         * ExitEvent
         * @description It has ended.
         */
        ExitEvent: {
            exit_code: number;
            timed_out: boolean;
            refused: components["schemas"]["RefusedHost"][];
        };
        /**
         * ProcessRequest
         * @description A command to run in the background; see ExecRequest.
         */
        ProcessRequest: {
            /** @default null */
            command?: string | null;
            /** @default null */
            argv?: string[] | null;
            /** @default null */
            workdir?: string | null;
            /** @default {} */
            env?: {
                [key: string]: string;
            };
            /**
             * @default user
             * @enum {unknown}
             */
            user?: "root" | "user";
        };
        /**
         * ProcessAnswer
         * @description A background process as it is now.
         */
        ProcessAnswer: {
            id: string;
            command: string;
            started: number;
            /** @description `running`, `exited`, or `lost` when its end could not be learnt. */
            state: string;
            exit_code: number | null;
            is_terminal: boolean;
            /** @description Printed so far. */
            stdout_bytes: number;
            /** @description Printed so far. */
            stderr_bytes: number;
        };
        /**
         * ProcessList
         * @description Background processes, oldest first.
         */
        ProcessList: {
            processes: components["schemas"]["ProcessAnswer"][];
        };
        /**
         * OutputChunk
         * @description A part of what a process printed.
         */
        OutputChunk: {
            data: string;
            offset: number;
            /** @description Where to read on. */
            next_offset: number;
            /** @description Bytes between the offset that was asked for and the oldest that is kept. */
            dropped: number;
            /** @description Nothing follows. */
            is_end: boolean;
            /** @enum {unknown} */
            encoding: "base64" | "utf-8";
        };
        /**
         * InputRequest
         * @description What a process is to read; `is_last` closes its input.
         */
        InputRequest: {
            /** @default  */
            text?: string;
            /** @default  */
            base64?: string;
            /** @default false */
            is_last?: boolean;
        };
        /**
         * SignalRequest
         * @description A signal by name or number, such as `TERM`.
         */
        SignalRequest: {
            /** @default TERM */
            signal?: string | number;
        };
        /**
         * SizeRequest
         * @description The size of a terminal.
         */
        SizeRequest: {
            rows: number;
            columns: number;
        };
        /**
         * TerminalRequest
         * @description A terminal; a login shell runs on it unless a command is given.
         */
        TerminalRequest: {
            /** @default null */
            command?: string | null;
            /** @default null */
            argv?: string[] | null;
            /** @default null */
            workdir?: string | null;
            /** @default {} */
            env?: {
                [key: string]: string;
            };
            /**
             * @default user
             * @enum {unknown}
             */
            user?: "root" | "user";
            /** @default 24 */
            rows?: number;
            /** @default 80 */
            columns?: number;
        };
        /**
         * FileContent
         * @description A part of a file. In `utf-8`, other bytes have become U+FFFD, and `is_text` is false.
         */
        FileContent: {
            path: string;
            size: number;
            offset: number;
            data: string;
            truncated: boolean;
            /** @enum {unknown} */
            encoding: "base64" | "utf-8";
            is_text: boolean;
        };
        /**
         * WriteRequest
         * @description The whole content of a file, as text or as bytes.
         */
        WriteRequest: {
            /** @description Beneath the workspace, or `/workspace/...`. */
            path: string;
            /** @default  */
            text?: string;
            /** @default  */
            base64?: string;
            /** @default true */
            parents?: boolean;
            /** @default true */
            overwrite?: boolean;
            /** @default null */
            mode?: number | null;
        };
        /**
         * Entry
         * @description One entry of the folder.
         */
        Entry: {
            /** @description Relative to the folder; ``.`` is the folder itself. */
            path: string;
            /**
             * @description ``file``, ``directory``, ``link``, ``fifo``, ``socket`` or ``device``.
             * @enum {unknown}
             */
            kind: "device" | "directory" | "fifo" | "file" | "link" | "socket";
            /** @description Bytes; of a sparse file, the holes included. */
            size: number;
            /** @description When its content changed, in seconds since 1970. */
            mtime: number;
            /** @description Permission bits. */
            mode: number;
            /**
             * @description Where a link leads.
             * @default null
             */
            target?: string | null;
        };
        /**
         * AppendRequest
         * @description What to add to a file.
         */
        AppendRequest: {
            /** @description Beneath the workspace, or `/workspace/...`. */
            path: string;
            /** @default  */
            text?: string;
            /** @default  */
            base64?: string;
            /** @default true */
            parents?: boolean;
        };
        /**
         * EditRequest
         * @description A text to replace. It must be there once, or `count` times; `all` takes any number.
         */
        EditRequest: {
            /** @description Beneath the workspace, or `/workspace/...`. */
            path: string;
            old: string;
            new: string;
            /** @default 1 */
            count?: number;
            /** @default false */
            all?: boolean;
        };
        /**
         * Edited
         * @description A file after an edit, and how often the text was replaced.
         */
        Edited: {
            entry: components["schemas"]["Entry"];
            replacements: number;
        };
        /**
         * Existence
         * @description Whether there is something.
         */
        Existence: {
            exists: boolean;
        };
        /**
         * Listing
         * @description Entries, and whether these are all.
         */
        Listing: {
            /** @description In order of directories, by name. */
            entries: components["schemas"]["Entry"][];
            /**
             * @description There may be more.
             * @default false
             */
            truncated?: boolean;
            /**
             * @description Why it was cut.
             * @default null
             */
            note?: string | null;
        };
        /**
         * Matches
         * @description Answer of grep.
         */
        Matches: {
            /** @description By file, by line. */
            matches: components["schemas"]["Match"][];
            /**
             * @description Files searched.
             * @default 0
             */
            files?: number;
            /**
             * @description Files passed over: binary, or unreadable.
             * @default 0
             */
            skipped?: number;
            /**
             * @description There may be more.
             * @default false
             */
            truncated?: boolean;
            /**
             * @description Why it was cut.
             * @default null
             */
            note?: string | null;
        };
        /**
         * Match
         * @description One matching line, with the lines around it that were asked for. Bytes that are no UTF-8 appear as U+FFFD.
         */
        Match: {
            path: string;
            line: number;
            text: string;
            /** @default [] */
            before?: string[];
            /** @default [] */
            after?: string[];
        };
        /**
         * MakeDirectoryRequest
         * @description A directory to make.
         */
        MakeDirectoryRequest: {
            /** @description Beneath the workspace, or `/workspace/...`. */
            path: string;
            /** @default true */
            parents?: boolean;
            /** @default true */
            exist_ok?: boolean;
        };
        /**
         * MoveRequest
         * @description An entry and its new path.
         */
        MoveRequest: {
            /** @description Beneath the workspace, or `/workspace/...`. */
            source: string;
            /** @description Beneath the workspace, or `/workspace/...`. */
            target: string;
            /** @default true */
            parents?: boolean;
            /** @default false */
            overwrite?: boolean;
        };
        /**
         * CopyRequest
         * @description An entry and the copy's path.
         */
        CopyRequest: {
            /** @description Beneath the workspace, or `/workspace/...`. */
            source: string;
            /** @description Beneath the workspace, or `/workspace/...`. */
            target: string;
            /** @default true */
            recursive?: boolean;
            /** @default true */
            parents?: boolean;
            /** @default false */
            overwrite?: boolean;
        };
        /**
         * Copied
         * @description What a copy or an unpacked archive made.
         */
        Copied: {
            /** @description Files, directories and links made. */
            entries: number;
            /** @description Bytes of files. */
            bytes: number;
            /**
             * @description Of the uploaded archive.
             * @default null
             */
            sha256?: string | null;
            /**
             * @description A sentence for each of the first entries that were left out.
             * @default []
             */
            skipped?: string[];
            /**
             * @description How many were left out.
             * @default 0
             */
            skipped_count?: number;
        };
        /**
         * DeleteRequest
         * @description An entry to delete.
         */
        DeleteRequest: {
            /** @description Beneath the workspace, or `/workspace/...`. */
            path: string;
            /** @default false */
            recursive?: boolean;
            /** @default false */
            missing_ok?: boolean;
        };
        /**
         * Deleted
         * @description How many entries were deleted.
         */
        Deleted: {
            deleted: number;
        };
        /**
         * ImportRequest
         * @description Files from another sandbox of the caller's, or from a host folder that policy names.
         */
        ImportRequest: {
            /** @description Beneath the workspace, or `/workspace/...`. */
            source: string;
            /** @description Beneath the workspace, or `/workspace/...`. */
            target: string;
            /**
             * @description Where they are.
             * @default null
             */
            sandbox?: string | null;
            /**
             * @description Name of one of `Policy.import_folders`.
             * @default null
             */
            folder?: string | null;
            /** @default false */
            overwrite?: boolean;
        };
        /**
         * ExportRequest
         * @description Files for a host folder that policy names in `Policy.export_folders`.
         */
        ExportRequest: {
            /** @description Beneath the workspace, or `/workspace/...`. */
            source: string;
            /** @description Beneath the workspace, or `/workspace/...`. */
            target: string;
            /** @description Letters, digits, `.`, `_`, `-`. */
            folder: string;
            /** @default false */
            overwrite?: boolean;
        };
        /**
         * InstallRequest
         * @description Packages to install.
         */
        InstallRequest: {
            /**
             * @description Names with extras and versions, such as `pandas[excel]==2.2.*`.
             * @default []
             */
            packages?: string[];
            /**
             * @description Path of a requirements file in the workspace.
             * @default null
             */
            requirements?: string | null;
            /**
             * @description `pip`; `npm` or `R` where the sandbox has it.
             * @default pip
             * @enum {unknown}
             */
            manager?: "R" | "npm" | "pip";
            /**
             * @description Newer versions in place of what is there.
             * @default false
             */
            upgrade?: boolean;
            /** @default 600 */
            timeout?: number;
        };
        /**
         * Installed
         * @description What came of it.
         */
        Installed: {
            /** @description All of them are there. */
            is_ok: boolean;
            /** @description What was installed, or what went wrong. */
            message: string;
            exit_code: number;
            duration: number;
            /** @description The end of what the package manager printed. */
            log: string;
            /** @description What the gate refused meanwhile: most often the reason. */
            refused: components["schemas"]["RefusedHost"][];
        };
        /**
         * ProgressEvent
         * @description A line of what the package manager prints.
         */
        ProgressEvent: {
            text: string;
        };
        /**
         * SandboxRequest
         * @description What a sandbox is to be like. Everything is optional, and nothing may be more than policy allows.
         */
        SandboxRequest: {
            /**
             * @description An id of the caller's own: asking again for the same returns the sandbox that is there.
             * @default null
             */
            id?: string | null;
            /**
             * @description One of the administrator's named sets of values.
             * @default null
             */
            profile?: string | null;
            /**
             * @description Name of the image that it is to run on; the profile's, or the host's own system, unless given.
             * @default null
             */
            image?: string | null;
            /**
             * @description Variables of everything that runs inside.
             * @default {}
             */
            env?: {
                [key: string]: string;
            };
            /**
             * @description Python packages to install before it is ready.
             * @default []
             */
            packages?: string[];
            /**
             * @description Files of the workspace to write first: text, or `{"base64": ...}`.
             * @default {}
             */
            files?: {
                [key: string]: string | components["schemas"]["FileBytes"];
            };
            /**
             * @description What it may reach; the profile's unless given, `[]` for nothing.
             * @default null
             */
            allowed_hosts?: string[] | null;
            /** @default {} */
            limits?: components["schemas"]["LimitsRequest"];
            /**
             * @description Seconds without use after which it ends.
             * @default null
             */
            idle_timeout?: number | null;
            /**
             * @description Seconds after which it ends, whatever it does.
             * @default null
             */
            max_life?: number | null;
            /**
             * @description What an idle one comes to: its end, or its being parked, saved on the disk until its next use.
             * @default delete
             * @enum {unknown}
             */
            idle_policy?: "delete" | "park";
            /**
             * @description Name of a workspace that is kept and shared by the owner's sandboxes of that tenant.
             * @default null
             */
            tenant?: string | null;
            /**
             * @description The tools that may be used on it; all unless given.
             * @default null
             */
            tools?: string[] | null;
            /**
             * @description Shell patterns of commands to refuse: a guard rail against accidents, no boundary.
             * @default []
             */
            blocked_commands?: string[];
            /**
             * @description Where commands and code start.
             * @default /workspace
             */
            workdir?: string;
            /**
             * @description TCP ports on which programs inside listen that may be reached at `/sandboxes/{id}/ports/{port}/`.
             * @default []
             */
            ports?: number[];
            /**
             * @description The caller's own notes.
             * @default {}
             */
            labels?: {
                [key: string]: string;
            };
        };
        /**
         * FileBytes
         * @description The content of a file that is not text.
         */
        FileBytes: {
            base64: string;
        };
        /**
         * LimitsRequest
         * @description Limits to narrow; what is left out is the profile's.
         */
        LimitsRequest: {
            /** @default null */
            memory?: number | string | null;
            /** @default null */
            cpus?: number | null;
            /** @default null */
            processes?: number | null;
            /** @default null */
            disk?: number | string | null;
        };
        /**
         * SandboxInfo
         * @description A sandbox as it is now. Times are seconds since the epoch.
         */
        SandboxInfo: {
            /** @description The id to call it by. */
            id: string;
            /** @description Its id in the audit log and on the machine. */
            sandbox_id: string | null;
            /**
             * @description `session` for one made here, `notebook` for that of a Jupyter kernel.
             * @enum {unknown}
             */
            kind: "notebook" | "session";
            owner: string;
            profile: string;
            /**
             * @description `unknown` if the runtime does not respond; `lost` if its record on disk is damaged: `end` says what is wrong, and deleting it removes its files.
             * @enum {unknown}
             */
            state: "ended" | "lost" | "parked" | "running" | "starting" | "unknown";
            /** @description Once it has ended, or is lost. */
            end: components["schemas"]["EndInfo"] | null;
            created: number;
            last_used: number;
            /** @description Seconds; null where the rules of sessions do not hold, as for notebooks. */
            idle_timeout: number | null;
            /** @description Seconds; null where the rules of sessions do not hold, as for notebooks. */
            max_life: number | null;
            limits: components["schemas"]["LimitsInfo"] | null;
            allowed_hosts: string[];
            kernels: components["schemas"]["KernelInfo"][];
            /**
             * @description `private`, `folder` (the notebook's own) or `tenant`.
             * @enum {unknown}
             */
            workspace: "folder" | "private" | "tenant";
            tenant: string | null;
            /** @description Those that may be used. */
            tools: string[];
            blocked_commands: string[];
            workdir: string;
            ports: number[];
            labels: {
                [key: string]: string;
            };
            runtime: string;
            /** @enum {unknown} */
            isolation: "gvisor" | "none";
            /** @description Address of its image; empty where it runs on the host's own system. */
            image: string;
            /** @description What code in it may be written in. */
            languages: string[];
            /** @description What it uses; null until it was measured, and of one that does not live. */
            usage: components["schemas"]["UsageInfo"] | null;
            /** @description Calls of tools that are on it now. */
            calls: components["schemas"]["CallInfo"][];
        };
        /**
         * EndInfo
         * @description How and why it ended.
         */
        EndInfo: {
            cause: string;
            exit_code: number;
            message: string;
            setting: string | null;
            /** @description When, in seconds since the epoch. */
            time: number;
            /**
             * @description Until when its files are kept, in seconds since the epoch: it can be revived with them. Null if they are not.
             * @default null
             */
            kept_until?: number | null;
        };
        /**
         * LimitsInfo
         * @description Its limits: bytes, processors' worth of time, processes and threads.
         */
        LimitsInfo: {
            memory: number;
            cpus: number;
            processes: number;
            disk: number;
        };
        /**
         * KernelInfo
         * @description A kernel that runs in it.
         */
        KernelInfo: {
            /** @description Jupyter's id of a notebook's kernel, else the name inside. */
            id: string;
            /**
             * @description `starting`, `running` or `ended`.
             * @enum {unknown}
             */
            state: "ended" | "parked" | "running" | "starting";
        };
        /**
         * UsageInfo
         * @description What it used when it was measured last, which is every two seconds while it is not frozen.
         */
        UsageInfo: {
            /** @description Bytes. */
            memory: number;
            /** @description Seconds of processor time since its start. */
            cpu: number;
            /** @description Bytes. */
            disk: number;
            /** @description When, in seconds since the epoch. */
            time: number;
        };
        /**
         * CallInfo
         * @description A call of a tool that is on it now.
         */
        CallInfo: {
            tool: string;
            /** @description Who calls. */
            by: string;
            /** @description Name of the token for this sandbox that it is made with. */
            token: string | null;
            /** @description Seconds since the epoch. */
            since: number;
        };
        /**
         * SandboxList
         * @description Sandboxes, oldest first.
         */
        SandboxList: {
            sandboxes: components["schemas"]["SandboxInfo"][];
        };
        /**
         * SandboxPatch
         * @description What to change of a living sandbox; what is left out stays. `allowed_hosts` replaces the whole list.
         */
        SandboxPatch: {
            allowed_hosts?: string[];
            /** @description Seconds. */
            idle_timeout?: number;
            /** @description Seconds. */
            max_life?: number;
            labels?: {
                [key: string]: string;
            };
        };
        /**
         * GrantInfo
         * @description What a sandbox may reach.
         */
        GrantInfo: {
            /** @description Patterns, presets expanded. */
            hosts: string[];
            /** @description Patterns, presets expanded. */
            private_hosts: string[];
            /** @description The most that it may be given, presets by name. */
            ceiling: string[];
            /** @description The setting behind it. */
            setting: string;
            /**
             * @description On the host that was asked about.
             * @default null
             */
            verdict?: components["schemas"]["HostVerdict"] | null;
        };
        /**
         * HostVerdict
         * @description Whether a sandbox may be given a host.
         */
        HostVerdict: {
            host: string;
            /** @description It is among those that it may reach, in the same words. */
            is_allowed: boolean;
            /** @description The caller may allow it. */
            may_allow: boolean;
            /** @description Why not. */
            message: string;
            /** @description The administrator's setting that would change it. */
            setting: string | null;
        };
        /**
         * AskRequest
         * @description A host that the sandbox needs, and what for.
         */
        AskRequest: {
            /** @description `name`, `*.name`, `name:port` or a preset. */
            host: string;
            /** @default  */
            why?: string;
        };
        /**
         * AskInfo
         * @description A host asked for.
         */
        AskInfo: {
            id: string;
            sandbox: string;
            host: string;
            why: string;
            /** @enum {unknown} */
            state: "allowed" | "denied" | "pending";
            asked: number;
            /** @default null */
            decided?: number | null;
            /** @default null */
            decided_by?: string | null;
            /** @default  */
            note?: string;
        };
        /**
         * AskList
         * @description Hosts asked for, oldest first.
         */
        AskList: {
            asks: components["schemas"]["AskInfo"][];
        };
        /**
         * AskDecision
         * @description A person's word on it.
         */
        AskDecision: {
            /** @enum {unknown} */
            decision: "allow" | "deny";
            /** @default  */
            note?: string;
        };
        /**
         * HttpRequest
         * @description A request to be sent through the sandbox's egress gate.
         */
        HttpRequest: {
            /** @description `http` or `https`. */
            url: string;
            /**
             * @default GET
             * @enum {unknown}
             */
            method?: "DELETE" | "GET" | "HEAD" | "OPTIONS" | "PATCH" | "POST" | "PUT";
            /** @default {} */
            headers?: {
                [key: string]: string;
            };
            /** @default  */
            body?: string;
            /** @default  */
            body_base64?: string;
            /** @default 30 */
            timeout?: number;
            /**
             * @description Bytes kept of the answer.
             * @default 1048576
             */
            max_bytes?: number;
        };
        /**
         * HttpAnswer
         * @description What the server answered. Redirects are not followed: ask for the next address, if policy allows its host.
         */
        HttpAnswer: {
            status: number;
            reason: string;
            headers: string[][];
            body: string;
            /** @enum {unknown} */
            encoding: "base64" | "utf-8";
            truncated: boolean;
            duration: number;
        };
        /**
         * SnapshotRequest
         * @description What to call a snapshot.
         */
        SnapshotRequest: {
            /**
             * @description For people.
             * @default
             */
            name?: string;
            /**
             * @description For people.
             * @default
             */
            note?: string;
        };
        /**
         * SnapshotInfo
         * @description A saved state of a sandbox. Times are seconds since the epoch, sizes bytes.
         */
        SnapshotInfo: {
            id: string;
            /** @description Id of the sandbox that it is of, as its owner calls it. */
            sandbox: string;
            owner: string;
            name: string;
            note: string;
            /** @description The snapshot that this state came from. */
            parent: string | null;
            created: number;
            /** @description Of what is restored: memory, writable layer and private workspace. */
            size: number;
            /** @description What it alone takes on the disk; pages that its parent has are shared. */
            cost: number;
            /** @description Whether the files of the workspace are part of it. A folder of the user's that is shown is not. */
            is_folder_kept: boolean;
        };
        /**
         * SnapshotList
         * @description Snapshots, oldest first.
         */
        SnapshotList: {
            snapshots: components["schemas"]["SnapshotInfo"][];
        };
        /**
         * RestoreRequest
         * @description Where to go back to.
         */
        RestoreRequest: {
            /** @description Id of a snapshot of the same sandbox. */
            snapshot: string;
        };
        /**
         * ForkRequest
         * @description What the new sandbox is to be like.
         */
        ForkRequest: {
            /**
             * @description An id of the caller's own for it. Jupyter chooses those of kernels.
             * @default null
             */
            id?: string | null;
            /**
             * @description Where it begins; as the sandbox is now unless given.
             * @default null
             */
            snapshot?: string | null;
            /**
             * @description Let random generators of a kernel go on from where they were. Unless set they are seeded anew.
             * @default false
             */
            keep_seeds?: boolean;
            /**
             * @description Of a notebook's kernel: make a Jupyter kernel of it, which a notebook can be opened with. Otherwise it is a sandbox whose context ``default`` is the kernel.
             * @default false
             */
            as_kernel?: boolean;
        };
        /**
         * TokenRequest
         * @description What a token is to be for.
         */
        TokenRequest: {
            /** @description What its holder may do in the sandbox: `read`, `write`, `execute`, and `restore`, which takes it back to one of its snapshots. None that its maker may not; who may `execute` may give `restore`. */
            verbs: ("execute" | "read" | "restore" | "write")[];
            /**
             * @description Letters, digits, `.`, `_`, `-`.
             * @default agent
             */
            name?: string;
            /**
             * @description Seconds until it expires; an hour unless given.
             * @default null
             */
            life?: number | null;
        };
        /**
         * TokenMade
         * @description A new token. Its text is told once, and kept nowhere.
         */
        TokenMade: {
            /** @description For the header `Authorization: Bearer ...`. */
            token: string;
            info: components["schemas"]["TokenInfo"];
        };
        /**
         * TokenInfo
         * @description A token, without its text. Times are seconds since the epoch.
         */
        TokenInfo: {
            id: string;
            name: string;
            /** @description Of its sandbox, in the audit log and on the machine. */
            sandbox_id: string;
            /** @description Whose sandbox it is, and who made the token. */
            owner: string;
            verbs: ("execute" | "read" | "restore" | "write")[];
            created: number;
            expires: number;
            /** @description Whose sandbox it is, and who made the token. */
            made_by: string;
        };
        /**
         * TokenList
         * @description Tokens of a sandbox that have not expired, oldest first.
         */
        TokenList: {
            tokens: components["schemas"]["TokenInfo"][];
        };
    };
    responses: never;
    parameters: never;
    requestBodies: never;
    headers: never;
    pathItems: never;
}
export type $defs = Record<string, never>;
export interface operations {
    get_health: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Health"];
                };
            };
        };
    };
    list_tools: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ToolList"];
                };
            };
        };
    };
    get_openapi: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": Record<string, unknown>;
                };
            };
        };
    };
    get_audit: {
        parameters: {
            query?: {
                kind?: string;
                is_allowed?: boolean;
                since?: number;
                until?: number;
                after_id?: number;
                /** @description Only rows before that one: the first of an answer leads to the older ones. */
                before_id?: number;
                /** @description Most rows. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AuditRows"];
                };
            };
        };
    };
    export_audit: {
        parameters: {
            query?: {
                /** @description Such as `egress`, `call` or `lifecycle`. */
                kind?: string;
                /** @description Only what was allowed, or only what was refused. */
                is_allowed?: boolean;
                /** @description Seconds since the epoch: from the one, and before the other. */
                since?: number;
                /** @description Seconds since the epoch: from the one, and before the other. */
                until?: number;
                /** @description Only rows after that one. */
                after_id?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/jsonl": string;
                };
            };
        };
    };
    verify_audit: {
        parameters: {
            query?: {
                /** @description That of an earlier check. */
                head?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AuditVerification"];
                };
            };
        };
    };
    run_code: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["CodeRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["CodeResult"];
                };
            };
        };
    };
    stream_code: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["CodeRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        /** @enum {string} */
                        event: "stream" | "display" | "result" | "clear" | "error" | "done" | "failure";
                        data: string;
                    };
                };
            };
        };
    };
    list_contexts: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ContextList"];
                };
            };
        };
    };
    create_context: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["ContextRequest"];
            };
        };
        responses: {
            /** @description Created */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ContextInfo"];
                };
            };
        };
    };
    delete_context: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Name of a kernel of the sandbox. */
                context: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description No Content */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    restart_context: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Name of a kernel of the sandbox. */
                context: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ContextInfo"];
                };
            };
        };
    };
    interrupt_context: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Name of a kernel of the sandbox. */
                context: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description No Content */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    run_command: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["ExecRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ExecAnswer"];
                };
            };
        };
    };
    stream_command: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["ExecRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        /** @enum {string} */
                        event: "stdout" | "stderr" | "exit" | "failure";
                        data: string;
                    };
                };
            };
        };
    };
    list_processes: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessList"];
                };
            };
        };
    };
    start_process: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["ProcessRequest"];
            };
        };
        responses: {
            /** @description Created */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessAnswer"];
                };
            };
        };
    };
    get_process: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessAnswer"];
                };
            };
        };
    };
    remove_process: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description No Content */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    read_output: {
        parameters: {
            query?: {
                stream?: "stderr" | "stdout";
                offset?: number;
                limit?: number;
                wait?: number;
                encoding?: "base64" | "utf-8";
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OutputChunk"];
                };
            };
        };
    };
    follow_process: {
        parameters: {
            query?: {
                stdout_offset?: number;
                stderr_offset?: number;
                encoding?: "base64" | "utf-8";
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        /** @enum {string} */
                        event: "stdout" | "stderr" | "exit" | "failure";
                        data: string;
                    };
                };
            };
        };
    };
    write_stdin: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["InputRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessAnswer"];
                };
            };
        };
    };
    signal_process: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["SignalRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessAnswer"];
                };
            };
        };
    };
    kill_process: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessAnswer"];
                };
            };
        };
    };
    resize_terminal: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SizeRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessAnswer"];
                };
            };
        };
    };
    wait_process: {
        parameters: {
            query?: {
                timeout?: number;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessAnswer"];
                };
            };
        };
    };
    open_terminal: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["TerminalRequest"];
            };
        };
        responses: {
            /** @description Created */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessAnswer"];
                };
            };
        };
    };
    read_file: {
        parameters: {
            query: {
                /** @description Beneath the workspace, or `/workspace/...`. */
                path: string;
                offset?: number;
                length?: number;
                encoding?: "base64" | "utf-8";
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["FileContent"];
                };
            };
        };
    };
    write_file: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["WriteRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Entry"];
                };
            };
        };
    };
    append_file: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["AppendRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Entry"];
                };
            };
        };
    };
    edit_file: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["EditRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Edited"];
                };
            };
        };
    };
    stat_file: {
        parameters: {
            query: {
                /** @description Beneath the workspace, or `/workspace/...`. */
                path: string;
                follow?: boolean;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Entry"];
                };
            };
        };
    };
    file_exists: {
        parameters: {
            query: {
                /** @description Beneath the workspace, or `/workspace/...`. */
                path: string;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Existence"];
                };
            };
        };
    };
    list_files: {
        parameters: {
            query?: {
                /** @description Beneath the workspace, or `/workspace/...`. */
                path?: string;
                recursive?: boolean;
                depth?: number;
                limit?: number;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Listing"];
                };
            };
        };
    };
    glob_files: {
        parameters: {
            query: {
                pattern: string;
                /** @description Beneath the workspace, or `/workspace/...`. */
                path?: string;
                limit?: number;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Listing"];
                };
            };
        };
    };
    grep_files: {
        parameters: {
            query: {
                pattern: string;
                /** @description Beneath the workspace, or `/workspace/...`. */
                path?: string;
                glob?: string;
                is_literal?: boolean;
                ignore_case?: boolean;
                before?: number;
                after?: number;
                limit?: number;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Matches"];
                };
            };
        };
    };
    make_directory: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["MakeDirectoryRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Entry"];
                };
            };
        };
    };
    move_file: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["MoveRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Entry"];
                };
            };
        };
    };
    copy_file: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["CopyRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Copied"];
                };
            };
        };
    };
    delete_file: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["DeleteRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Deleted"];
                };
            };
        };
    };
    download_file: {
        parameters: {
            query: {
                /** @description Beneath the workspace, or `/workspace/...`. */
                path: string;
                digest?: boolean;
            };
            header?: {
                Range?: string;
            };
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/octet-stream": string;
                };
            };
            /** @description Partial Content */
            206: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/octet-stream": string;
                };
            };
        };
    };
    upload_file: {
        parameters: {
            query: {
                /** @description Beneath the workspace, or `/workspace/...`. */
                path: string;
                size?: number;
                sha256?: string;
                parents?: boolean;
                overwrite?: boolean;
                /** @description Permission bits. */
                mode?: number;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Entry"];
                };
            };
        };
    };
    download_archive: {
        parameters: {
            query?: {
                /** @description Beneath the workspace, or `/workspace/...`. */
                path?: string;
                kind?: "tar" | "zip";
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/octet-stream": string;
                };
            };
        };
    };
    upload_archive: {
        parameters: {
            query?: {
                /** @description Beneath the workspace, or `/workspace/...`. */
                path?: string;
                size?: number;
                sha256?: string;
                overwrite?: boolean;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Copied"];
                };
            };
        };
    };
    import_files: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ImportRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Copied"];
                };
            };
        };
    };
    export_files: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ExportRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Copied"];
                };
            };
        };
    };
    install_packages: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["InstallRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Installed"];
                };
            };
        };
    };
    stream_installation: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["InstallRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        /** @enum {string} */
                        event: "progress" | "result" | "failure";
                        data: string;
                    };
                };
            };
        };
    };
    list_sandboxes: {
        parameters: {
            query?: {
                /** @description Exact values. */
                state?: "ended" | "lost" | "parked" | "running" | "starting" | "unknown";
                /** @description Exact values. */
                profile?: string;
                /** @description Exact values. */
                tenant?: string;
                /** @description Exact values. */
                kernel_id?: string;
                /** @description `name` or `name=value`. */
                label?: string[];
                /** @description For administrators; others see only their own. */
                owner?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxList"];
                };
            };
        };
    };
    create_sandbox: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["SandboxRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
            /** @description Created */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    get_sandbox: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    delete_sandbox: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description No Content */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    patch_sandbox: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["SandboxPatch"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    revive_sandbox: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    get_egress: {
        parameters: {
            query?: {
                /** @description `name`, `*.name`, `name:port` or a preset. */
                host?: string;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["GrantInfo"];
                };
            };
        };
    };
    get_egress_log: {
        parameters: {
            query?: {
                kind?: string;
                is_allowed?: boolean;
                since?: number;
                until?: number;
                after_id?: number;
                /** @description Only rows before that one: the first of an answer leads to the older ones. */
                before_id?: number;
                /** @description Most rows. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AuditRows"];
                };
            };
        };
    };
    list_asks: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AskList"];
                };
            };
        };
    };
    ask_host: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["AskRequest"];
            };
        };
        responses: {
            /** @description Accepted */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AskInfo"];
                };
            };
        };
    };
    get_ask: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a question for a host. */
                ask: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AskInfo"];
                };
            };
        };
    };
    decide_ask: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a question for a host. */
                ask: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["AskDecision"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AskInfo"];
                };
            };
        };
    };
    list_pending_asks: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AskList"];
                };
            };
        };
    };
    http_request: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["HttpRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["HttpAnswer"];
                };
            };
        };
    };
    get_sandbox_audit: {
        parameters: {
            query?: {
                kind?: string;
                is_allowed?: boolean;
                since?: number;
                until?: number;
                after_id?: number;
                /** @description Only rows before that one: the first of an answer leads to the older ones. */
                before_id?: number;
                /** @description Most rows. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AuditRows"];
                };
            };
        };
    };
    export_sandbox_audit: {
        parameters: {
            query?: {
                /** @description Such as `egress`, `call` or `lifecycle`. */
                kind?: string;
                /** @description Only what was allowed, or only what was refused. */
                is_allowed?: boolean;
                /** @description Seconds since the epoch: from the one, and before the other. */
                since?: number;
                /** @description Seconds since the epoch: from the one, and before the other. */
                until?: number;
                /** @description Only rows after that one. */
                after_id?: number;
            };
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/jsonl": string;
                };
            };
        };
    };
    list_snapshots: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SnapshotList"];
                };
            };
        };
    };
    take_snapshot: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["SnapshotRequest"];
            };
        };
        responses: {
            /** @description Created */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SnapshotInfo"];
                };
            };
        };
    };
    restore_sandbox: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["RestoreRequest"];
            };
        };
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    fork_sandbox: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/json": components["schemas"]["ForkRequest"];
            };
        };
        responses: {
            /** @description Created */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    list_all_snapshots: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SnapshotList"];
                };
            };
        };
    };
    import_snapshot: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            /** @description Created */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SnapshotInfo"];
                };
            };
        };
    };
    export_snapshot: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a snapshot. */
                snapshot: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/octet-stream": string;
                };
            };
        };
    };
    get_snapshot: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a snapshot. */
                snapshot: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SnapshotInfo"];
                };
            };
        };
    };
    delete_snapshot: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a snapshot. */
                snapshot: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description No Content */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    park_sandbox: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    wake_sandbox: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    list_tokens: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OK */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["TokenList"];
                };
            };
        };
    };
    create_token: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["TokenRequest"];
            };
        };
        responses: {
            /** @description Created */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["TokenMade"];
                };
            };
        };
    };
    revoke_token: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a token, which is not the token. */
                token: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description No Content */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    connect_terminal: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description Id of a background process. */
                process: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Switching Protocols */
            101: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    get_port: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description One of the sandbox's `ports`. */
                port: number;
                /** @description Path and query of the request that the program gets. */
                path: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What the program answers. */
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    put_port: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description One of the sandbox's `ports`. */
                port: number;
                /** @description Path and query of the request that the program gets. */
                path: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What the program answers. */
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    post_port: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description One of the sandbox's `ports`. */
                port: number;
                /** @description Path and query of the request that the program gets. */
                path: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What the program answers. */
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    delete_port: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description One of the sandbox's `ports`. */
                port: number;
                /** @description Path and query of the request that the program gets. */
                path: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What the program answers. */
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    options_port: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description One of the sandbox's `ports`. */
                port: number;
                /** @description Path and query of the request that the program gets. */
                path: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What the program answers. */
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    head_port: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description One of the sandbox's `ports`. */
                port: number;
                /** @description Path and query of the request that the program gets. */
                path: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What the program answers. */
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    patch_port: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description Id of a sandbox: the caller's own, or the one that it was given. A notebook's has its kernel's id too. */
                id: string;
                /** @description One of the sandbox's `ports`. */
                port: number;
                /** @description Path and query of the request that the program gets. */
                path: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What the program answers. */
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
}

/** For each operation: its verb and its path. */
export const ROUTES = {
    get_health: ["GET", "/health"],
    list_tools: ["GET", "/tools"],
    get_openapi: ["GET", "/openapi.json"],
    get_audit: ["GET", "/audit"],
    export_audit: ["GET", "/audit/export"],
    verify_audit: ["GET", "/audit/verify"],
    run_code: ["POST", "/sandboxes/{id}/code"],
    stream_code: ["POST", "/sandboxes/{id}/code/stream"],
    list_contexts: ["GET", "/sandboxes/{id}/contexts"],
    create_context: ["POST", "/sandboxes/{id}/contexts"],
    delete_context: ["DELETE", "/sandboxes/{id}/contexts/{context}"],
    restart_context: ["POST", "/sandboxes/{id}/contexts/{context}/restart"],
    interrupt_context: ["POST", "/sandboxes/{id}/contexts/{context}/interrupt"],
    run_command: ["POST", "/sandboxes/{id}/exec"],
    stream_command: ["POST", "/sandboxes/{id}/exec/stream"],
    start_process: ["POST", "/sandboxes/{id}/processes"],
    list_processes: ["GET", "/sandboxes/{id}/processes"],
    get_process: ["GET", "/sandboxes/{id}/processes/{process}"],
    remove_process: ["DELETE", "/sandboxes/{id}/processes/{process}"],
    read_output: ["GET", "/sandboxes/{id}/processes/{process}/output"],
    follow_process: ["GET", "/sandboxes/{id}/processes/{process}/follow"],
    write_stdin: ["POST", "/sandboxes/{id}/processes/{process}/stdin"],
    signal_process: ["POST", "/sandboxes/{id}/processes/{process}/signal"],
    kill_process: ["POST", "/sandboxes/{id}/processes/{process}/kill"],
    resize_terminal: ["POST", "/sandboxes/{id}/processes/{process}/size"],
    wait_process: ["GET", "/sandboxes/{id}/processes/{process}/wait"],
    open_terminal: ["POST", "/sandboxes/{id}/terminals"],
    read_file: ["GET", "/sandboxes/{id}/files/content"],
    write_file: ["PUT", "/sandboxes/{id}/files/content"],
    append_file: ["POST", "/sandboxes/{id}/files/append"],
    edit_file: ["POST", "/sandboxes/{id}/files/edit"],
    stat_file: ["GET", "/sandboxes/{id}/files/stat"],
    file_exists: ["GET", "/sandboxes/{id}/files/exists"],
    list_files: ["GET", "/sandboxes/{id}/files"],
    glob_files: ["GET", "/sandboxes/{id}/files/glob"],
    grep_files: ["GET", "/sandboxes/{id}/files/grep"],
    make_directory: ["POST", "/sandboxes/{id}/files/mkdir"],
    move_file: ["POST", "/sandboxes/{id}/files/move"],
    copy_file: ["POST", "/sandboxes/{id}/files/copy"],
    delete_file: ["POST", "/sandboxes/{id}/files/delete"],
    download_file: ["GET", "/sandboxes/{id}/files/download"],
    upload_file: ["PUT", "/sandboxes/{id}/files/upload"],
    upload_archive: ["PUT", "/sandboxes/{id}/files/archive"],
    download_archive: ["GET", "/sandboxes/{id}/files/archive"],
    import_files: ["POST", "/sandboxes/{id}/files/import"],
    export_files: ["POST", "/sandboxes/{id}/files/export"],
    install_packages: ["POST", "/sandboxes/{id}/packages"],
    stream_installation: ["POST", "/sandboxes/{id}/packages/stream"],
    create_sandbox: ["POST", "/sandboxes"],
    list_sandboxes: ["GET", "/sandboxes"],
    get_sandbox: ["GET", "/sandboxes/{id}"],
    patch_sandbox: ["PATCH", "/sandboxes/{id}"],
    delete_sandbox: ["DELETE", "/sandboxes/{id}"],
    revive_sandbox: ["POST", "/sandboxes/{id}/revive"],
    get_egress: ["GET", "/sandboxes/{id}/egress"],
    get_egress_log: ["GET", "/sandboxes/{id}/egress/log"],
    ask_host: ["POST", "/sandboxes/{id}/egress/asks"],
    list_asks: ["GET", "/sandboxes/{id}/egress/asks"],
    get_ask: ["GET", "/sandboxes/{id}/egress/asks/{ask}"],
    decide_ask: ["POST", "/sandboxes/{id}/egress/asks/{ask}"],
    list_pending_asks: ["GET", "/egress/asks"],
    http_request: ["POST", "/sandboxes/{id}/http"],
    get_sandbox_audit: ["GET", "/sandboxes/{id}/audit"],
    export_sandbox_audit: ["GET", "/sandboxes/{id}/audit/export"],
    take_snapshot: ["POST", "/sandboxes/{id}/snapshots"],
    list_snapshots: ["GET", "/sandboxes/{id}/snapshots"],
    restore_sandbox: ["POST", "/sandboxes/{id}/restore"],
    fork_sandbox: ["POST", "/sandboxes/{id}/fork"],
    list_all_snapshots: ["GET", "/snapshots"],
    import_snapshot: ["POST", "/snapshots/import"],
    export_snapshot: ["GET", "/snapshots/{snapshot}/export"],
    get_snapshot: ["GET", "/snapshots/{snapshot}"],
    delete_snapshot: ["DELETE", "/snapshots/{snapshot}"],
    park_sandbox: ["POST", "/sandboxes/{id}/park"],
    wake_sandbox: ["POST", "/sandboxes/{id}/wake"],
    create_token: ["POST", "/sandboxes/{id}/tokens"],
    list_tokens: ["GET", "/sandboxes/{id}/tokens"],
    revoke_token: ["DELETE", "/sandboxes/{id}/tokens/{token}"],
    connect_terminal: ["GET", "/sandboxes/{id}/terminals/{process}/socket"],
    get_port: ["GET", "/sandboxes/{id}/ports/{port}/{path}"],
    head_port: ["HEAD", "/sandboxes/{id}/ports/{port}/{path}"],
    post_port: ["POST", "/sandboxes/{id}/ports/{port}/{path}"],
    put_port: ["PUT", "/sandboxes/{id}/ports/{port}/{path}"],
    patch_port: ["PATCH", "/sandboxes/{id}/ports/{port}/{path}"],
    delete_port: ["DELETE", "/sandboxes/{id}/ports/{port}/{path}"],
    options_port: ["OPTIONS", "/sandboxes/{id}/ports/{port}/{path}"],
} as const;

/** For each operation that answers events: their names, and what their data is. */
export interface EventStreams {
    stream_code: {
        stream: components["schemas"]["StreamEvent"];
        display: components["schemas"]["DisplayEvent"];
        result: components["schemas"]["ResultEvent"];
        clear: components["schemas"]["ClearEvent"];
        error: components["schemas"]["ErrorEvent"];
        done: components["schemas"]["DoneEvent"];
    };
    stream_command: {
        stdout: components["schemas"]["OutputEvent"];
        stderr: components["schemas"]["OutputEvent"];
        exit: components["schemas"]["ExitEvent"];
    };
    follow_process: {
        stdout: components["schemas"]["OutputEvent"];
        stderr: components["schemas"]["OutputEvent"];
        exit: components["schemas"]["ExitEvent"];
    };
    stream_installation: {
        progress: components["schemas"]["ProgressEvent"];
        result: components["schemas"]["Installed"];
    };
}
