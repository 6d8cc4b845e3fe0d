BEGIN TRANSACTION;
CREATE TABLE epoch_floor (
    single_row INTEGER PRIMARY KEY CHECK (single_row = 1),
    epoch INTEGER NOT NULL
);
INSERT INTO "epoch_floor" VALUES(1,1);
CREATE TABLE results (
    session_id TEXT NOT NULL,
    turn_index INTEGER NOT NULL,
    idempotency_key TEXT NOT NULL,
    digest TEXT,
    result BLOB NOT NULL,
    PRIMARY KEY (session_id, turn_index)
);
INSERT INTO "results" VALUES('s',0,'k','d',X'72');
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    replica_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    timeout_s REAL,
    capacity_tokens INTEGER,
    created_s REAL NOT NULL,
    last_used_s REAL NOT NULL,
    open_key TEXT,
    tools TEXT
) WITHOUT ROWID;
INSERT INTO "sessions" VALUES('s','tenant','a',1,4,2,30.0,99,5.0,1000.0,'o','tools');
CREATE TABLE turns (
    session_id TEXT NOT NULL,
    turn_index INTEGER NOT NULL,
    start_len INTEGER NOT NULL,
    input_len INTEGER NOT NULL,
    idempotency_key TEXT,
    digest TEXT,
    tokens BLOB NOT NULL,
    PRIMARY KEY (session_id, turn_index)
);
INSERT INTO "turns" VALUES('s',0,0,2,'k','d',X'010000000200000003000000');
INSERT INTO "turns" VALUES('s',1,3,1,NULL,NULL,X'04000000');
COMMIT;
PRAGMA application_id = 1262830663;
PRAGMA user_version = 2;
