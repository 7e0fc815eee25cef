-- What a table said last to every row alike, by function: nothing is buried for it until an operator accepts it.
create table fabric.refusals (
    function    text not null,
    sqlstate    text not null,
    message     text not null,
    constraint_ text not null,
    since       timestamptz not null default now(),
    last_said   timestamptz not null default now(),
    accepted_at timestamptz,
    primary key (function, sqlstate, message, constraint_)
);
comment on table fabric.refusals is
    'words in which a table refused every row of a function alike; accepted ones make dead letters';
